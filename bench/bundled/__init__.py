"""The bundled models: their data, their training, and what they can do, in figures.

Two small language models come with minfer so that everything can be tried offline: a
target, and a draft that guesses for it. They continue Python, and hold short
conversations whose answers can be checked. What can be checked is made by a seeded
generator (`tasks`, `dialogues`), endless and without repeats; a twentieth of all
problems, chosen by a hash, is never trained on.

    prepare    on any machine: sources, tokenizer -> one folder of at most 10 MiB
    train      on one GPU: the target, then the draft from it, in pieces of some minutes
    export     the checkpoint in the Hugging Face layout
    evaluate   through minfer: accuracy by task, loops, refusals
    measure    bits per byte of held-out Python, agreement of draft and target

The README beside this file has the commands.
"""
