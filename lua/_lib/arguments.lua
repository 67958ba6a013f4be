-- arguments: the msgpack map of a call's arguments. Every script but submit includes it.
A = cmsgpack.unpack(ARGV[1])
