"""Write a finished model for other runtimes: ONNX Runtime and llama.cpp."""
