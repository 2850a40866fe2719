"""Training: losses and loops for what the engine learns. One file per thing that is trained."""
