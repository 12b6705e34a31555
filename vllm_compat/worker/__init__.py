"""What runs inside vLLM's worker processes. Nothing here imports speculators.

``extension``: the class that vLLM mixes into its worker; its methods are the RPCs.
``model``: finds the decoder layers and how they return the residual stream.
``capture``: forward hooks that take the rows.
``outbox``: sends them.
"""
