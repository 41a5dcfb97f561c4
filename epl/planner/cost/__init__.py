"""What a model costs: its layers as numbers, the time and the memory that follow for given devices."""
