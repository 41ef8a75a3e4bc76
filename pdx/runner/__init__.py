"""The rank process: owns one device's share of a model and its KV memory, runs what it is sent."""
