"""What the bytes of weights mean: formats, codebooks, the activation between matrices. No model, no instruction set."""
