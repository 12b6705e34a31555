"""Real model families, tiny random weights, compared with transformers.

Each family of ``registry.py`` becomes a checkpoint of four layers made on the fly
(``checkpoints.py``), runs through the unmodified generator in a process of its own
(``case.py``), and every row of every layer is compared with transformers' float32 states.
What vLLM's CPU backend can't compute is worked round here, in the harness, and nowhere else
(``cpu_workarounds.py``).
"""
