"""What a decode step of KTMoEWrapper's layers takes, eager and as a CUDA graph."""
