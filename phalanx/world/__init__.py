"""What a rank knows: who it is, on which device, on which place of the mesh. Importing this needs no torch."""
