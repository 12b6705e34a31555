"""How captured rows get from the worker that computed them to the user's process.

``messages``: what is said, whatever carries it. ``shared``: a nameless memory file and two
pipes. The other carrier is the reply of vLLM's own RPC (``rpc``), which needs no code here.
"""
