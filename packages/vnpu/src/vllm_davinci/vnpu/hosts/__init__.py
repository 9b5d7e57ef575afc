"""How ranks on several hosts find and reach each other, over torch's TCPStore and gloo.

The device calls these modules when a group of ranks is made; nothing else does.
"""
