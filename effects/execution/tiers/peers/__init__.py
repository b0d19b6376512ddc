"""KV blocks that engines send each other.

peer_plan      whom an engine sends to, and where it receives, as its settings say
peers          the keyed store of an engine that sends or receives blocks
sender         sends blocks to one other engine
listener       receives blocks from other engines
inbox          received blocks, in slots of memory, until the engine fetches them
remote_memory  an inbox that engines of other machines write to through NIXL
peer_messages  the messages between sender and listener

Connections between processes of a deployment, also used by `live.link.tcp_links` and
`execution.ranks.joining`:

addresses      local sockets, and TCP ports
door           accepts and makes connections whose sides prove that they know the secret
handshake      how both sides prove that
framing        messages on a blocking socket
"""
