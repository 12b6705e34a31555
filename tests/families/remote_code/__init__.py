"""Stand-ins for the Python files that some model repositories carry.

They are copied into checkpoints and loaded by transformers as remote code. Each does the least
that loading the model and running text prompts needs.
"""
