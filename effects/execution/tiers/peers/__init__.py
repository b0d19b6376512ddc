"""KV blocks that engines send each other.

peer_plan      where an engine sends and receives blocks, by its settings
peers          the keyed store of an engine that sends or receives blocks
sender         sends blocks to one other engine
block_receiver receives blocks from other engines
inbox          received blocks, in slots of memory, until the engine fetches them
remote_memory  an inbox that engines of other machines write to through NIXL
peer_messages  the messages between sender and receiver

Connections are those of `net`: both sides prove that they know the secret.
"""
