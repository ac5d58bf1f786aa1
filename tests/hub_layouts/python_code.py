"""Python code of repositories, in our own words."""

# IndicBERT v3: Gemma 3 in which each token sees all others.
BIDIRECTIONAL_GEMMA = '''\
"""Gemma 3 whose tokens see each other in both directions."""

from transformers import Gemma3ForCausalLM, Gemma3TextConfig, Gemma3TextModel


class Gemma3BiModel(Gemma3TextModel):
    config_class = Gemma3TextConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.layers:
            layer.self_attn.is_causal = False
            layer.self_attn.sliding_window = None

    def forward(self, input_ids=None, attention_mask=None, inputs_embeds=None, **settings):
        embedded = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        whole = None
        if attention_mask is not None:
            hidden = (1.0 - attention_mask[:, None, None, :].to(embedded.dtype)) * -1e9
            whole = hidden.expand(-1, 1, embedded.shape[1], -1)
        masks = {"full_attention": whole, "sliding_attention": whole}
        return super().forward(attention_mask=masks, inputs_embeds=embedded, **settings)


class Gemma3BiForMNTP(Gemma3ForCausalLM):
    config_class = Gemma3TextConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = Gemma3BiModel(config)
        self.post_init()
'''
