"""What uses the heart: reference models, built-in data sets, packing of data, recipes and past runs of them."""
