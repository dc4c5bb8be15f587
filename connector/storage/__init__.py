"""Where objects are kept beyond the engine: the pinned pool first, slower tiers behind it, all read by ranges."""
