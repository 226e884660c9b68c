"""One flat view over any array. A `Buffer` shares the caller's memory: a collective that writes to `flat` writes there.

dtypes        the element types
buffer        Buffer: NumPy's arrays
gpu_buffer    GPU memory of CuPy, ordered by streams
torch_tensor  torch's tensors, on the CPU and on a GPU
dlpack        arrays of other libraries, such as JAX
view          as_buffer: the buffer of any of these
libraries     what is done with the arrays of each library in its own way: one table
memory        where arrays lie, and which have memory in common
trees         nested dicts, lists and tuples of arrays, by name
scan          whether an array has NaN or infinity
cuda          CUDA, through CuPy: streams, events, memory; device_selection: which GPU a rank gets

No layer above asks which library an array came from; frameworks are never imported here, only recognised when the
caller has imported them. Only `buffer.message_bytes` passes GPU memory to MPI: it first waits for the work that
produced it.
"""
