"""SGLang's models with an attention that computes no queries for rows that maps give (MapFlow, § Fused retrieval).

SGLang takes the classes here in the place of its own of the same names if SGLANG_EXTERNAL_MODEL_PACKAGE names this
package. Whatever maps do not give is computed by SGLang's own code.
"""
