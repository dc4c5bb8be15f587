"""One program of several modules: loads under concurrency in a real vLLM engine, and what its recordings say.

Run `measure.py`; it writes JSON lines, which `report.py` reads, and `lamella validate` too.

    what runs        arms, cells, groups, prompts
    one call         run: repeats by closed_loop on engine, a vLLM engine (llm, weights) whose connector is exchanged
                     (connector_exchange, documents, graph_choice, kept_pool), its ranks (rank), what is seen of them
                     (probe) and the cores of their threads (host_cores)
    what it writes   recording: what a line holds, read and checked
    what it says     rules: which repeats count; figures and link from them; goals, choices, several_runs and two_gpus
                     judge; tables and plots show
"""
