"""What every model is built on: the algebra of states, blocks, layers, files."""
