"""How a run is distributed. The only package that names DDP, FSDP and ZeRO."""
