"""`minfer compare`: levels of one model beside each other, on a text and under load.

A level is a dtype, a value of --quantization, a type of KV cache (kv:fp8), or another
checkpoint with the same tokenizer. The first level is the base. Levels run one after the
other, and the weights of one are freed before the next is loaded. For each level are
measured:

    memory        of weights and of the KV cache: as planned, and as held by tensors
    perplexity    exp of the mean of -log p(next token), over all positions
    divergence    mean over all positions of KL(base || level) in nats: the sum over the
                  vocabulary of p_base * (log p_base - log p_level)
    agreement     share of positions at which base and level have the same likeliest token
    TTFT, TPOT    median over requests; throughput: output tokens a second of a batch

The text is cut into windows of `max_model_len` tokens, which do not overlap; the rest
behind the last whole window is left out. The positions are those whose next token is in
the same window. Divergence needs all probabilities of base and level at the same
positions, so the base's are kept in a temporary file: 4 bytes x vocabulary x positions,
which --tokens bounds (2,048 tokens x 150,000 are 1.2 GB).
"""
