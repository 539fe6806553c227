"""From text to batches, and questions about a text.

corpus.py   English prose from a Debian package (`train corpus`); prose.py takes the markup away
documents.py, tokens.py   which documents there are and which are held out; the tokenizers
data.py     token arrays on disk and batches of them (`train prepare`)
recall.py   what a model finds in a long text (`train recall`)
"""
