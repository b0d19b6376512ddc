"""KV blocks that engines send each other, and how processes of a deployment meet.

peer_plan      whom an engine sends to, and where it gets blocks
peers          what it sends, and gets: a keyed store
sender         sends blocks to another engine
listener       receives them, into an
inbox          memory in slots
remote_memory  which others may write to themselves, through NIXL
peer_messages  what is said beside the blocks
handshake      both sides prove that they know the secret
door           lets in those that do
addresses      local sockets, and TCP ports
framing        messages on a socket
"""
