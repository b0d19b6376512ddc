"""Processes, and connections between them. It imports no other folder of `effects`.

addresses           paths of local sockets, and TCP ports
framing             messages on a stream of bytes
handshake           both sides prove that they know the secret
listener            accepts connections, and makes them
child               a process that its parent starts, watches and ends
heartbeat           of a process, as its watcher sees it
run_folder          a private folder for sockets
secret_variables    secrets in the environment, kept from other programs
"""
