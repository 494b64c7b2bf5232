"""Checkpoints and weights of other programs: torch.distributed.checkpoint (DCP), safetensors, Hugging Face folders.

dcp_index.py            what a DCP checkpoint has, from its pickle, without running it
dcp_reader.py           reads and verifies its records
dcp_models.py           finds the weights of models among its names
dcp_optimizers.py       finds the state of optimizers, in each form
dcp_match.py            matches it with the objects of a run
matched_reader.py       a matched checkpoint, as one of Paceline's
dcp_restore.py          plans the restore of a run from any checkpoint
safetensors_reader.py   reads safetensors files, also several with an index
weights_source.py       weights wherever they are stored
weights_import.py       fills models with them
weights_export.py       writes them to a file, or a Hugging Face folder
conversion.py           what a checkpoint in another format consists of
convert.py              writes it
staged_folder.py        folders that appear complete
"""
