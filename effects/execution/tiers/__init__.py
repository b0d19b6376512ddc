"""KV blocks in host memory and in a keyed store, and their copies to and from the device.

tier_copiers     performs an engine's transfers: one copier for each tier
page_copier      copies pages between the device and host memory
keyed_copier     copies blocks between the device and a keyed store
transfer_thread  performs the transfers of one direction, in order
paged_tensors       the tensors of a cache, and how their pages cross the bus
host_pages       the pages in host memory
head_slices      how a block is divided between ranks of engines that exchange it
keyed_store      what a keyed store does (a protocol): a folder, or other engines
block_folder     a keyed store: files, shared by the engines of a machine
block_files      the file of one block
folder_epochs    the epochs of the prefix cache, beside those files
peers            a keyed store: blocks that engines send each other
"""
