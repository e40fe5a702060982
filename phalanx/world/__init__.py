"""A rank's position in its job, its device and its coordinates on the mesh. Importing this needs no torch."""
