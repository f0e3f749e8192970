"""Options that XLA compiles the device programs with, on GPUs; measured on an H200."""

PROGRAM = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_command_buffer": ""}
"""DeepSeek-V2-Lite shapes. XLA's autotuner times each product alone, with its weights in the L2
cache; in the whole step its choices were slower (4.0 ms a step against 2.8). CUDA graphs are
updated before a run whenever some address has changed, and nothing runs meanwhile: verification,
whose kernels are long enough to be launched in time, takes 6.3 ms with them, 6.0 without."""

DRAFT = PROGRAM | {"xla_gpu_enable_command_buffer": "FUSION,CUSTOM_CALL,WHILE"}
"""A draft step is 250 short kernels, 8 to 9 us each to launch (2.3 to 2.4 ms a step). With the loop
over steps in the graph, one update serves all steps of a chunk: 1.73 ms. Without it 2.4 ms."""

PROMPT = PROGRAM | {"xla_gpu_enable_triton_gemm": False}
"""Without the autotuner XLA's own matrix products take one tiling whatever their size: of 163 ms
for 512 tokens they took 110. cuBLAS chooses by size. Not for decoding, where a row's bits may not
depend on how many rows there are."""
