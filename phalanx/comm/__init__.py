"""How bytes move between ranks: collectives written out, shared memory, buckets, compression, a parameter server."""
