"""What a model is and computes: its spec, read from config.json, and its layers.

spec.py, spec_reader.py     `ModelSpec`, all sizes of a model; read from a config.json
model.py                    `forward`: one packed step, from token ids to logits
batch.py, model_step.py     what a step gets: tokens, slots, block tables
cache.py, kv_format.py      the cache's interface to layers; how it stores tokens
layers.py, layer_step.py     a decoder layer: an attention and a feed-forward; its step
gqa.py, mla.py              the attentions: sizes, weights, and the step of each, of the
                            first in gqa_reader.py, gqa_weights.py and gqa_step.py
layer_heads.py, layer_inputs.py     what differs by layer, and inputs of layers
dense.py, moe.py            the feed-forwards: the same of each, of the second in
                            moe_weights.py and moe_step.py
gaussian_topk.py            a dense one, most of whose channels are zero
altup.py, laurel.py         several residual streams; a part of one beside attention
linear.py                   matrices, fused and sharded
products.py, product_context.py     the kernels that multiply, and what a step tells them
weights.py                  the tree of weights, and a checkpoint's tensors in it
rope_scaling.py, query_scale.py     positions: rotation, and factors of queries
windows.py, attention_window.py     sliding windows
quantization.py, quantization_files.py              which matrices are quantized
refusals.py                 models that are refused by name
"""
