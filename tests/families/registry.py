"""The families, as data.

One record per family. ``config`` is what differs from ``SIZES``; a value of ``None`` takes the
key away (for config classes that have no such field). Everything that a family needs beyond a
config class and a model class of transformers is named by a string that ``checkpoints.py`` or
``cpu_workarounds.py`` resolves, so that this file imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: Prompts of one ``generate()`` call: a block and a bit, less than a block, many blocks (past
#: every sliding window and attention chunk below), one token over a block.
PROMPT_LENGTHS = (50, 3, 129, 17)

#: Sliding windows and attention chunks, in tokens: below the longest prompts.
WINDOW = 32
CHUNK = 64

SPECIAL_TOKENS = (
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|media_pad|>",
    "<image>",
    "<racm3:break>",
    "<eoss>",
    "<unk>",
    "<s>",
    "</s>",
)
VOCABULARY = 512
ORDINARY_TOKENS = VOCABULARY - len(SPECIAL_TOKENS)
TOKEN_ID = {token: ORDINARY_TOKENS + i for i, token in enumerate(SPECIAL_TOKENS)}

SIZES: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "bos_token_id": TOKEN_ID["<s>"],
    "eos_token_id": TOKEN_ID["</s>"],
    "pad_token_id": 0,
    # Larger than real models have: with so few and so narrow layers, each one must still
    # change the residual stream by tens of percent, or a wrong layer would hide in it.
    "initializer_range": 0.06,
}

#: Largest relative error of one row, ``|got - reference| / |reference|``, by the dtype that the
#: model computed in. A row that belongs to another token is off by about 1.
TOLERANCE: Mapping[str, float] = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 6e-2}


@dataclass(frozen=True)
class Family:
    """One model family and how it is tried.

    Attributes:
        name: identifier, used for the test and in the results.
        title: what people call it.
        vllm_class: class that vLLM runs it with (checked).
        model: class of transformers that makes the weights and the reference.
        config_class: class of transformers; ``model`` with its suffix replaced, if empty.
        config: differences from ``SIZES``.
        architecture: what config.json calls the model, if not ``model``.
        writer: function of ``checkpoints.py`` that makes checkpoint and reference.
        dtypes: what the model computes in, one test each. ``auto`` is a float32 checkpoint
            with vLLM's own choice (bfloat16).
        tolerance: in place of ``TOLERANCE``, by dtype.
        workarounds: names in ``cpu_workarounds.WORKAROUNDS``.
        env: environment of the generator's process.
        tokenizer: class that the generator must have loaded, where that is the point.
        refused: words of the sentence that refuses it, for one that must be.
        fast: in the default run.
        tensor_parallel: also run with ``tensor_parallel_size=2``.
        vllm: versions of vLLM that have it (PEP 440); empty for all from 0.16.0.
        note: for the page in docs/.
    """

    name: str
    title: str
    vllm_class: str
    model: str = ""
    config_class: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    architecture: str = ""
    writer: str = "plain"
    dtypes: tuple[str, ...] = ("float32",)
    tolerance: Mapping[str, float] = field(default_factory=dict)
    workarounds: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    tokenizer: str = ""
    refused: str = ""
    fast: bool = False
    tensor_parallel: bool = False
    vllm: str = ""
    note: str = ""

    def allowed(self, dtype: str) -> float:
        """Largest relative error of a row that passes, for states of ``dtype``."""
        return self.tolerance.get(dtype, TOLERANCE[dtype])


MOE = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}
DEEPSEEK = {
    "head_dim": None,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "rope_interleave": True,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
YARN = {
    "n_group": 1,
    "topk_group": 1,
    "rope_scaling": {
        "rope_type": "yarn",
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
#: The CPU backend has no MLA kernel; vLLM then computes the same attention unabsorbed.
NO_MLA = {"VLLM_MLA_DISABLE": "1"}
VISION_IDS = {
    "image_token_id": TOKEN_ID["<|image_pad|>"],
    "video_token_id": TOKEN_ID["<|video_pad|>"],
    "vision_start_token_id": TOKEN_ID["<|vision_start|>"],
    "vision_end_token_id": TOKEN_ID["<|vision_end|>"],
}

#: For models with as many key heads as query heads, whose configs know no other.
MULTI_HEAD = {"num_key_value_heads": None, "head_dim": None}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
#: The only ones that vLLM's CPU kernel of linear attention knows.
WIDE_HEADS = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
#: The newest vLLM of the matrix, with the first transformers that has these models.
NEWEST = ">=0.32"
CHAMELEON = {
    "head_dim": None,
    "vocabulary_map": {
        "<image>": TOKEN_ID["<image>"],
        "IMGIMGAZ": ORDINARY_TOKENS - 1,
    },
    "vq_config": {
        "embed_dim": 32,
        "num_embeddings": 1,
        "latent_channels": 32,
        "resolution": 32,
        "base_channels": 32,
        "channel_multiplier": [1],
        "num_res_blocks": 1,
    },
}

FAMILIES: tuple[Family, ...] = (
    Family(
        "llama",
        "Llama",
        "LlamaForCausalLM",
        "LlamaForCausalLM",
        dtypes=("float32", "bfloat16", "float16", "auto"),
        fast=True,
        tensor_parallel=True,
    ),
    Family(
        "llama_tied",
        "Llama, tied embeddings",
        "LlamaForCausalLM",
        "LlamaForCausalLM",
        config={"tie_word_embeddings": True},
    ),
    Family(
        "mistral",
        "Mistral",
        "MistralForCausalLM",
        "MistralForCausalLM",
        config={"sliding_window": None},
    ),
    Family(
        "mistral_window",
        "Mistral, every layer slides",
        "MistralForCausalLM",
        "MistralForCausalLM",
        config={"sliding_window": WINDOW},
    ),
    Family("qwen2", "Qwen2", "Qwen2ForCausalLM", "Qwen2ForCausalLM", config={"head_dim": None}),
    Family(
        "qwen3",
        "Qwen3",
        "Qwen3ForCausalLM",
        "Qwen3ForCausalLM",
        dtypes=("float32", "bfloat16"),
        fast=True,
    ),
    Family(
        "qwen3_moe",
        "Qwen3-MoE",
        "Qwen3MoeForCausalLM",
        "Qwen3MoeForCausalLM",
        config=MOE,
        tensor_parallel=True,
    ),
    Family(
        "mixtral",
        "Mixtral",
        "MixtralForCausalLM",
        "MixtralForCausalLM",
        config={"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    Family(
        "gpt_oss",
        "GPT-OSS",
        "GptOssForCausalLM",
        "GptOssForCausalLM",
        # All experts take part in each token: the CPU kernel computes in bfloat16 only, where
        # a choice of experts flips with rounding and would hide an error.
        config={"num_local_experts": 4, "num_experts_per_tok": 4, "sliding_window": WINDOW},
        dtypes=("bfloat16",),
        note="bfloat16 only: vLLM's CPU kernel has no float32; every expert is active.",
    ),
    Family(
        "gemma2",
        "Gemma 2",
        "Gemma2ForCausalLM",
        "Gemma2ForCausalLM",
        config={
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 32,
            "hidden_act": "gelu_pytorch_tanh",
        },
        fast=True,
    ),
    Family(
        "gemma3",
        "Gemma 3 (text)",
        "Gemma3ForCausalLM",
        "Gemma3ForCausalLM",
        config_class="Gemma3TextConfig",
        config={
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 32,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "num_hidden_layers": 6,
        },
    ),
    Family(
        "phi3",
        "Phi-3, every layer slides",
        "Phi3ForCausalLM",
        "Phi3ForCausalLM",
        config={"head_dim": None, "sliding_window": WINDOW},
    ),
    Family(
        "glm4",
        "GLM-4",
        "Glm4ForCausalLM",
        "Glm4ForCausalLM",
        config={"partial_rotary_factor": 0.5, "attention_bias": True},
    ),
    Family(
        "glm4_moe",
        "GLM-4-MoE",
        "Glm4MoeForCausalLM",
        "Glm4MoeForCausalLM",
        config={
            "partial_rotary_factor": 0.5,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "use_qk_norm": True,
        },
    ),
    Family(
        "deepseek_v2",
        "DeepSeek-V2",
        "DeepseekV2ForCausalLM",
        "DeepseekV2ForCausalLM",
        config=DEEPSEEK
        | {
            "q_lora_rank": None,
            "rope_interleave": None,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
            "topk_method": "greedy",
            "norm_topk_prob": False,
            "scoring_func": "softmax",
        },
        workarounds=("native_rope",),
        env=NO_MLA,
    ),
    Family(
        "deepseek_v3",
        "DeepSeek-V3, default rope",
        "DeepseekV3ForCausalLM",
        "DeepseekV3ForCausalLM",
        config=DEEPSEEK,
        workarounds=("native_rope",),
        env=NO_MLA,
    ),
    Family(
        "deepseek_v3_yarn",
        "DeepSeek-V3, yarn",
        "DeepseekV3ForCausalLM",
        "DeepseekV3ForCausalLM",
        config=DEEPSEEK | YARN,
        env=NO_MLA,
    ),
    Family(
        "deepseek_llama4_scaling",
        "DeepSeek style with llama_4_scaling",
        "DeepseekV3ForCausalLM",
        "DeepseekV3ForCausalLM",
        config=DEEPSEEK
        | YARN
        | {"llama_4_scaling": {"original_max_position_embeddings": 16, "beta": 0.5}},
        writer="llama4_scaling",
        env=NO_MLA,
        note="Reference: transformers' DeepSeek-V3 with the queries scaled in a hook.",
    ),
    Family(
        "kimi_k2",
        "Kimi-K2",
        "DeepseekV3ForCausalLM",
        "DeepseekV3ForCausalLM",
        config=DEEPSEEK | YARN,
        writer="kimi_k2",
        tokenizer="TikTokenTokenizer",
        env=NO_MLA,
        note="Config and tokenizer are remote code, as in the real repository.",
    ),
    Family(
        "kimi_k2_5",
        "Kimi-K2.5, text prompts",
        "KimiK25ForConditionalGeneration",
        "DeepseekV3ForCausalLM",
        config=DEEPSEEK | YARN,
        writer="kimi_k2_5",
        tokenizer="TikTokenTokenizer",
        env=NO_MLA,
        fast=True,
        note="Config, tokenizer and image processor are remote code.",
    ),
    Family(
        "kimi_k2_5_int4",
        "Kimi-K2.5, INT4 experts",
        "KimiK25ForConditionalGeneration",
        "DeepseekV3ForCausalLM",
        config=DEEPSEEK | YARN,
        writer="kimi_k2_5_int4",
        workarounds=("int4_dequantised",),
        env=NO_MLA,
        note="compressed-tensors W4A16 pack-quantized, experts only, as in the real "
        "checkpoint; the reference has the same weights dequantised.",
    ),
    Family(
        "llama_int4",
        "Llama, INT4",
        "LlamaForCausalLM",
        "LlamaForCausalLM",
        writer="llama_int4",
        workarounds=("int4_dequantised",),
        note="compressed-tensors W4A16 pack-quantized; the reference has the same weights "
        "dequantised.",
    ),
    Family(
        "llama4",
        "Llama 4 (text)",
        "Llama4ForCausalLM",
        "Llama4ForCausalLM",
        config_class="Llama4TextConfig",
        config={
            "intermediate_size": 64,
            "intermediate_size_mlp": 256,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": CHUNK,
            "use_qk_norm": True,
        },
        workarounds=("router_weight_on_input",),
    ),
    Family(
        "qwen2_5_vl",
        "Qwen2.5-VL, text prompts",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
        config_class="Qwen2_5_VLConfig",
        config={
            "text_config": {
                "head_dim": None,
                "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
            },
            "vision_config": {
                "depth": 2,
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_heads": 4,
                "out_hidden_size": 128,
                "patch_size": 14,
                "window_size": 112,
                "fullatt_block_indexes": [1],
            },
            **VISION_IDS,
        },
        writer="qwen_vl",
    ),
    Family(
        "qwen3_vl",
        "Qwen3-VL, text prompts",
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLForConditionalGeneration",
        config_class="Qwen3VLConfig",
        config={
            "text_config": {
                "rope_scaling": {
                    "rope_type": "default",
                    "mrope_interleaved": True,
                    "mrope_section": [8, 4, 4],
                },
            },
            "vision_config": {
                "depth": 4,
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_heads": 4,
                "out_hidden_size": 128,
                "deepstack_visual_indexes": [0, 1, 2],
                "num_position_embeddings": 64,
            },
            **VISION_IDS,
        },
        writer="qwen_vl",
        fast=True,
    ),
    Family(
        "olmo2",
        "OLMo 2",
        "Olmo2ForCausalLM",
        "Olmo2ForCausalLM",
        config={"head_dim": None},
        fast=True,
    ),
    Family(
        "granite",
        "Granite",
        "GraniteForCausalLM",
        "GraniteForCausalLM",
        config={
            "head_dim": None,
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.1,
            "logits_scaling": 8.0,
        },
    ),
    Family(
        "granite_hybrid",
        "Granite 4 (hybrid class, attention layers)",
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridForCausalLM",
        config={
            "head_dim": None,
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.1,
            "logits_scaling": 8.0,
            "layer_types": ["attention"] * 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 64,
            "intermediate_size": 64,
            "position_embedding_type": "rope",
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
        },
        note="Attention layers only: the CPU backend has no Mamba-2 kernels.",
    ),
    Family(
        "minimax_m2",
        "MiniMax-M2",
        "MiniMaxM2ForCausalLM",
        writer="minimax_m2",
        workarounds=("sigmoid_routing",),
        note="Reference: written out in torch; transformers 4.57 has no such model.",
    ),
    Family("seed_oss", "Seed-OSS", "SeedOssForCausalLM", "SeedOssForCausalLM"),
    Family(
        "ernie_moe",
        "ERNIE 4.5 MoE",
        "Ernie4_5_MoeForCausalLM",
        "Ernie4_5_MoeForCausalLM",
        config_class="Ernie4_5_MoeConfig",
        config={
            "head_dim": None,
            "moe_num_experts": 8,
            "moe_k": 2,
            "moe_intermediate_size": 64,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
        },
    ),
    Family(
        "cohere2",
        "Cohere 2 (Command R7B)",
        "CohereForCausalLM",
        "Cohere2ForCausalLM",
        config={"head_dim": None, "sliding_window": WINDOW},
        fast=True,
        note="Layers return the full hidden state and a stale residual.",
    ),
    Family(
        "exaone4",
        "EXAONE 4",
        "Exaone4ForCausalLM",
        "Exaone4ForCausalLM",
        config={"head_dim": None, "sliding_window": WINDOW},
        note="Layers return the full hidden state and a stale residual.",
    ),
    Family(
        "smollm3",
        "SmolLM3 (Transformers backend)",
        "TransformersForCausalLM",
        "SmolLM3ForCausalLM",
        config={"head_dim": None},
    ),
    Family(
        "phimoe",
        "Phi-3.5-MoE",
        "PhiMoEForCausalLM",
        "PhimoeForCausalLM",
        config={
            "head_dim": None,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "attention_bias": True,
            "lm_head_bias": True,
        },
        architecture="PhiMoEForCausalLM",
        note="Layers return the full hidden state and a stale residual.",
    ),
    Family(
        "stablelm",
        "StableLM",
        "StablelmForCausalLM",
        "StableLmForCausalLM",
        config={"head_dim": None},
        note="Layers return the full hidden state and a stale residual.",
    ),
    Family(
        "hunyuan_dense",
        "HunYuan V1 dense",
        "HunYuanDenseV1ForCausalLM",
        "HunYuanDenseV1ForCausalLM",
        config_class="HunYuanDenseV1Config",
        config={"use_qk_norm": True},
        note="Layers return three tensors.",
    ),
    Family(
        "hunyuan_moe",
        "HunYuan V1 MoE",
        "HunYuanMoEV1ForCausalLM",
        "HunYuanMoEV1ForCausalLM",
        config_class="HunYuanMoEV1Config",
        config={
            "num_experts": 4,
            "moe_topk": 2,
            "moe_intermediate_size": 256,
            "num_shared_expert": 1,
            "use_mixed_mlp_moe": True,
            "use_qk_norm": True,
        },
        note="Layers return three tensors.",
    ),
    Family(
        "chameleon",
        "Chameleon, text prompts",
        "ChameleonForConditionalGeneration",
        "ChameleonForConditionalGeneration",
        config=CHAMELEON,
        writer="chameleon",
    ),
    Family(
        "chameleon_swin",
        "Chameleon with swin_norm (30B), text prompts",
        "ChameleonForConditionalGeneration",
        "ChameleonForConditionalGeneration",
        config=CHAMELEON | {"swin_norm": True},
        writer="chameleon",
        refused="disagree about the residual",
        note="Refused. vLLM's own final norm adds a residual that the layers had already "
        "added. Layers return the full hidden state and a stale residual.",
    ),
    Family("gemma", "Gemma", "GemmaForCausalLM", "GemmaForCausalLM"),
    Family("arcee", "Arcee", "ArceeForCausalLM", "ArceeForCausalLM"),
    Family(
        "apertus",
        "Apertus",
        "ApertusForCausalLM",
        "ApertusForCausalLM",
        config={"head_dim": None},
        tolerance={"float32": 5e-3},
        note="vLLM keeps the parameters of its activation (xIELU) in bfloat16.",
    ),
    Family(
        "olmo3",
        "OLMo 3",
        "Olmo2ForCausalLM",
        "Olmo3ForCausalLM",
        config={"head_dim": None, "sliding_window": WINDOW},
    ),
    Family(
        "olmoe",
        "OLMoE",
        "OlmoeForCausalLM",
        "OlmoeForCausalLM",
        config={"head_dim": None, "num_experts": 8, "num_experts_per_tok": 2},
    ),
    Family(
        "qwen2_moe",
        "Qwen2-MoE",
        "Qwen2MoeForCausalLM",
        "Qwen2MoeForCausalLM",
        config=MOE
        | {
            "head_dim": None,
            "shared_expert_intermediate_size": 64,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
    ),
    Family(
        "granite_moe",
        "Granite-MoE",
        "GraniteMoeForCausalLM",
        "GraniteMoeForCausalLM",
        config={
            "head_dim": None,
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.1,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    Family(
        "nemotron",
        "Nemotron",
        "NemotronForCausalLM",
        "NemotronForCausalLM",
    ),
    Family(
        "starcoder2",
        "StarCoder2",
        "Starcoder2ForCausalLM",
        "Starcoder2ForCausalLM",
        config={"head_dim": None, "sliding_window": None},
    ),
    Family(
        "phi",
        "Phi",
        "PhiForCausalLM",
        "PhiForCausalLM",
        # vLLM always makes the inner layer four times as wide.
        config=MULTI_HEAD | {"intermediate_size": 4 * SIZES["hidden_size"]},
    ),
    Family(
        "gpt_neox",
        "GPT-NeoX (Pythia)",
        "GPTNeoXForCausalLM",
        "GPTNeoXForCausalLM",
        config=MULTI_HEAD,
    ),
    Family(
        "gpt2",
        "GPT-2",
        "GPT2LMHeadModel",
        "GPT2LMHeadModel",
        config_class="GPT2Config",
        config=MULTI_HEAD | {"intermediate_size": None, "max_position_embeddings": 1024},
    ),
    Family(
        "opt",
        "OPT",
        "OPTForCausalLM",
        "OPTForCausalLM",
        config=MULTI_HEAD
        | {"intermediate_size": None, "ffn_dim": 256, "word_embed_proj_dim": 128},
    ),
    Family(
        "bloom",
        "BLOOM",
        "BloomForCausalLM",
        "BloomForCausalLM",
        config=MULTI_HEAD | {"intermediate_size": None},
        tolerance={"float32": 1e-3},
        note="vLLM computes its activation exactly, transformers the tanh form of it.",
    ),
    Family(
        "falcon",
        "Falcon",
        "FalconForCausalLM",
        "FalconForCausalLM",
        config=MULTI_HEAD | {"intermediate_size": None},
    ),
    Family(
        "chatglm",
        "ChatGLM (GLM-4-9B as published first)",
        "ChatGLMForCausalLM",
        "GlmForCausalLM",
        architecture="ChatGLMModel",
        config={"attention_bias": True, "rope_theta": 10000.0},
        writer="chatglm",
        fast=True,
        note="The layers are in a module called encoder. Reference: transformers' own GLM, "
        "which computes the same; the weights are written under ChatGLM's names. Config is "
        "remote code.",
    ),
    Family("glm", "GLM", "GlmForCausalLM", "GlmForCausalLM", config={"attention_bias": True}),
    Family(
        "dots1",
        "dots.llm1",
        "Dots1ForCausalLM",
        "Dots1ForCausalLM",
        config={
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            # vLLM reads these; transformers' class has no such fields, real checkpoints do.
            "moe_layer_freq": 1,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
        },
        note="Scaling factor 1: with another, vLLM 0.16.0 scales the shared experts too, "
        "transformers the routed ones only; real checkpoints have 2.5.",
    ),
    Family("ernie4_5", "ERNIE 4.5", "Ernie4_5ForCausalLM", "Ernie4_5ForCausalLM"),
    Family(
        "olmo",
        "OLMo",
        "OlmoForCausalLM",
        "OlmoForCausalLM",
        # vLLM's class has as many key heads as query heads.
        config={"head_dim": None, "num_key_value_heads": 4},
    ),
    Family(
        "granite_moe_shared",
        "Granite-MoE with shared experts",
        "GraniteMoeSharedForCausalLM",
        "GraniteMoeSharedForCausalLM",
        config={
            "head_dim": None,
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.1,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 64,
        },
    ),
    Family(
        "flex_olmo",
        "FlexOlmo",
        "FlexOlmoForCausalLM",
        "FlexOlmoForCausalLM",
        config={"head_dim": None, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    Family(
        "persimmon",
        "Persimmon",
        "PersimmonForCausalLM",
        "PersimmonForCausalLM",
        config=MULTI_HEAD | {"partial_rotary_factor": 0.5},
    ),
    Family(
        "gpt_bigcode",
        "StarCoder (GPT-BigCode)",
        "GPTBigCodeForCausalLM",
        "GPTBigCodeForCausalLM",
        config=MULTI_HEAD | {"intermediate_size": None, "n_inner": 256},
    ),
    Family(
        "gpt_j",
        "GPT-J",
        "GPTJForCausalLM",
        "GPTJForCausalLM",
        config=MULTI_HEAD | {"intermediate_size": None, "n_inner": 256, "rotary_dim": 16},
    ),
    Family(
        "mpt",
        "MPT",
        "MPTForCausalLM",
        "MptForCausalLM",
        config=MULTI_HEAD
        | {
            "intermediate_size": None,
            "num_hidden_layers": 4,
            # transformers always makes the inner layer four times as wide.
            "expansion_ratio": 4,
            "max_position_embeddings": None,
            "max_seq_len": 2048,
        },
    ),
    Family(
        "dbrx",
        "DBRX",
        "DbrxForCausalLM",
        "DbrxForCausalLM",
        config=MULTI_HEAD
        | {
            "intermediate_size": None,
            "max_position_embeddings": None,
            "max_seq_len": 2048,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
            "ffn_config": {
                "ffn_hidden_size": 64,
                "moe_num_experts": 4,
                "moe_top_k": 2,
                "ffn_act_fn": {"name": "silu"},
            },
        },
    ),
    Family(
        "qwen3_next",
        "Qwen3-Next",
        "Qwen3NextForCausalLM",
        "Qwen3NextForCausalLM",
        config=MOE
        | LINEAR
        | {
            "shared_expert_intermediate_size": 64,
            "decoder_sparse_step": 1,
        },
        workarounds=("gated_delta_net",),
    ),
    # What came after 0.16.0. Nothing in vllm-compat knows any of them.
    Family(
        "gemma4",
        "Gemma 4 (text)",
        "Gemma4ForCausalLM",
        "Gemma4ForCausalLM",
        config_class="Gemma4TextConfig",
        config={
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "num_hidden_layers": 6,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": VOCABULARY,
        },
        vllm=NEWEST,
        note="Embeddings of their own for each layer.",
    ),
    Family(
        "qwen3_5",
        "Qwen3.5",
        "Qwen3_5ForCausalLM",
        "Qwen3_5ForCausalLM",
        config_class="Qwen3_5TextConfig",
        config=LINEAR | WIDE_HEADS,
        dtypes=("bfloat16",),
        vllm=NEWEST,
        note="bfloat16 only: so is vLLM's CPU kernel of its linear attention.",
    ),
    Family(
        "qwen3_5_moe",
        "Qwen3.5-MoE",
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeForCausalLM",
        config_class="Qwen3_5MoeTextConfig",
        # All experts take part, as for GPT-OSS.
        config=MOE
        | LINEAR
        | WIDE_HEADS
        | {
            "num_experts": 4,
            "num_experts_per_tok": 4,
            "shared_expert_intermediate_size": 64,
        },
        dtypes=("bfloat16",),
        # Rounding adds up from layer to layer, more than in Qwen3.5 itself.
        tolerance={"bfloat16": 0.1},
        vllm=NEWEST,
        note="bfloat16 only, as Qwen3.5; every expert is active.",
    ),
    Family(
        "cohere2_moe",
        "Cohere 2 MoE",
        "Cohere2MoeForCausalLM",
        "Cohere2MoeForCausalLM",
        config={
            "sliding_window": 512,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "num_shared_experts": 1,
        },
        vllm=NEWEST,
        note="No prompt is as long as the window: vLLM's is one token longer than "
        "transformers'.",
    ),
    Family(
        "exaone_moe",
        "K-EXAONE (EXAONE MoE)",
        "ExaoneMoeForCausalLM",
        "ExaoneMoeForCausalLM",
        config={
            "sliding_window": WINDOW,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "num_shared_experts": 1,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 1,
        },
        vllm=NEWEST,
    ),
    Family(
        "hyperclovax",
        "HyperCLOVA X",
        "HyperCLOVAXForCausalLM",
        "HyperCLOVAXForCausalLM",
        config_class="HyperCLOVAXConfig",
        config={
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.1,
            "use_post_norm": True,
        },
        vllm=NEWEST,
    ),
    Family(
        "ministral3",
        "Ministral 3",
        "MistralForCausalLM",
        "Ministral3ForCausalLM",
        vllm=NEWEST,
    ),
    Family(
        "granite_swa",
        "Granite with sliding windows",
        "GraniteForCausalLM",
        "GraniteSWAForCausalLM",
        config_class="GraniteSWAConfig",
        config={
            "head_dim": None,
            "sliding_window": WINDOW,
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.1,
        },
        vllm=NEWEST,
    ),
)

BY_NAME: Mapping[str, Family] = {family.name: family for family in FAMILIES}
