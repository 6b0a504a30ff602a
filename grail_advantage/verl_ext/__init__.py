"""Everything that needs verl: trainer, worker, plugin entry point and the CPU platform.

The rest of the package runs with torch and transformers alone, so verl is imported only below this folder.
"""
