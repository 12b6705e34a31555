"""Tiny random checkpoints and their reference states, made on the fly.

``make(family, dtype, folder)`` writes ``folder/model`` (what vLLM loads) and
``folder/reference.pt``. Weights are random with fixed seeds, rounded to the checkpoint's dtype
before the reference is computed, so that both sides have the same ones. One-dimensional
parameters are moved away from their initial 1 or 0, since a norm of all ones, or a bias of all
zeros, hides a mistake in it.

The reference is the output of each decoder layer of transformers' model, in float32, caught by
forward hooks: that includes the last layer before the final norm, which transformers' own
``output_hidden_states`` doesn't give. For all other layers the two are compared.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import nn

from . import registry
from .registry import PROMPT_LENGTHS, SIZES, TOKEN_ID, Family

REMOTE_CODE = Path(__file__).with_name("remote_code")
SAVED_AS = {
    "float32": torch.float32,
    "auto": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def prompts() -> list[list[int]]:
    """The token ids of the prompts, the same for every family."""
    rng = random.Random(7)
    return [
        [rng.randrange(1, registry.ORDINARY_TOKENS) for _ in range(length)]
        for length in PROMPT_LENGTHS
    ]


def key(family: Family, dtype: str) -> str:
    """A name for the checkpoint that changes with everything it is made from."""
    source = inspect.getsource(inspect.getmodule(key))  # type: ignore[arg-type]
    parts = [json.dumps(asdict(family), sort_keys=True, default=str), dtype, source]
    parts += [json.dumps(dict(SIZES)), transformers.__version__, torch.__version__]
    parts += [path.read_text() for path in sorted(REMOTE_CODE.glob("*.py"))]
    return f"{family.name}-{dtype}-{hashlib.sha256(''.join(parts).encode()).hexdigest()[:12]}"


def make(family: Family, dtype: str, cache: Path) -> Path:
    """Make the checkpoint under ``cache`` if it isn't there; return its folder."""
    folder = cache / key(family, dtype)
    if (folder / "reference.pt").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "model").mkdir(parents=True)
    writer: Callable[[Family, torch.dtype, Path], list[torch.Tensor]] = WRITERS[family.writer]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        states = writer(family, SAVED_AS[dtype], folder / "model")
    # Last, so that an interrupted run leaves nothing that looks complete.
    torch.save({"prompts": prompts(), "states": states}, folder / "reference.pt")
    return folder


# --- models and references -----------------------------------------------------------------


def merge(base: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {k: v for k, v in {**base, **changes}.items() if v is not None}


def config_of(family: Family) -> Any:
    """The family's transformers config, in tiny sizes."""
    cls = getattr(transformers, family.config_class or _config_name(family.model))
    changes = dict(family.config)
    nested = changes.get("text_config")
    if nested is not None:
        changes["text_config"] = merge(dict(SIZES), **nested)
        return cls(**changes)
    return cls(**merge(dict(SIZES), **changes))


def _config_name(model: str) -> str:
    for suffix in ("ForCausalLM", "ForConditionalGeneration"):
        model = model.removesuffix(suffix)
    return f"{model}Config"


def model_of(family: Family, dtype: torch.dtype, config: Any = None) -> Any:
    """transformers' model of the family, float32, with weights that ``dtype`` can hold."""
    config = config or config_of(family)
    cls = getattr(transformers, family.model)
    model = cls._from_config(config, attn_implementation="eager").float().eval()
    move_off_defaults(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype).float()
    return model


def move_off_defaults(model: nn.Module) -> None:
    """Perturb norms, biases and routing corrections, which start as ones or zeros."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or "norm" in name:
                scale = 0.1 if "norm" in name else 0.02
                parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn(buffer.shape, generator=generator) * 0.05)


def decoder_layers(model: Any) -> nn.ModuleList:
    """The layers, wherever the model has them: ``model.layers``, ``transformer.h``, ..."""
    inner = model
    for name in ("model", "transformer", "gpt_neox", "language_model", "decoder"):
        inner = getattr(inner, name, inner)
    layers = next(
        getattr(inner, name) for name in ("layers", "h", "blocks") if hasattr(inner, name)
    )
    assert isinstance(layers, nn.ModuleList)
    return layers


def reference(model: Any, of: Sequence[Sequence[int]] | None = None) -> list[torch.Tensor]:
    """States after each decoder layer: one float32 tensor [layers, tokens, hidden] a prompt."""
    caught: dict[int, torch.Tensor] = {}

    def catch(index: int) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            caught[index] = first.detach().clone()

        return hook

    layers = decoder_layers(model)
    handles = [layer.register_forward_hook(catch(i)) for i, layer in enumerate(layers)]
    result = []
    for prompt in of or prompts():
        caught.clear()
        with torch.no_grad():
            output = model(
                input_ids=torch.tensor([prompt]), output_hidden_states=True, use_cache=False
            )
        states = torch.stack([caught[i].reshape(len(prompt), -1) for i in range(len(layers))])
        for i in range(len(layers) - 1):
            theirs = output.hidden_states[i + 1].reshape(len(prompt), -1)
            torch.testing.assert_close(states[i], theirs, rtol=1e-5, atol=1e-5)
        result.append(states.float())
    for handle in handles:
        handle.remove()
    return result


# --- files of a checkpoint ------------------------------------------------------------------


def write_tokenizer(folder: Path, cls: Any = transformers.PreTrainedTokenizerFast) -> Any:
    """A word-level tokenizer: word ``t17`` is id 17."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {f"t{i}": i for i in range(registry.ORDINARY_TOKENS)} | TOKEN_ID
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = cls(
        tokenizer_object=core,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        sep_token="</s>",
        additional_special_tokens=list(registry.SPECIAL_TOKENS[:-3]),
    )
    tokenizer.chat_template = (
        "{% for m in messages %}<s> {{ m['role'] }} {{ m['content'] }} </s>{% endfor %}"
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON object in a file; ``None`` takes a key away."""
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(merge(content, **changes), indent=1))


def remote_code(folder: Path, *names: str) -> None:
    for name in names:
        shutil.copy(REMOTE_CODE / name, folder / name)


def remote_tokenizer(folder: Path) -> None:
    """Make the folder's tokenizer one that only remote code can load, as Kimi's is."""
    remote_code(folder, "tokenization_kimi.py")
    edit_json(
        folder / "tokenizer_config.json",
        tokenizer_class="TikTokenTokenizer",
        auto_map={"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
    )


def save_weights(folder: Path, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Write the tensors; float32 ones in ``dtype``, but routing corrections, which stay."""
    converted = {
        name: (
            tensor
            if tensor.dtype != torch.float32 or name.endswith("e_score_correction_bias")
            else tensor.to(dtype)
        ).contiguous()
        for name, tensor in tensors.items()
    }
    save_file(converted, folder / "model.safetensors", metadata={"format": "pt"})


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- writers --------------------------------------------------------------------------------


def plain(family: Family, dtype: torch.dtype, folder: Path) -> list[torch.Tensor]:
    model = model_of(family, dtype)
    states = reference(model)
    model.to(dtype).save_pretrained(folder)
    if family.architecture:
        edit_json(folder / "config.json", architectures=[family.architecture])
    write_tokenizer(folder)
    return states


def qwen_vl(family: Family, dtype: torch.dtype, folder: Path) -> list[torch.Tensor]:
    states = plain(family, dtype, folder)
    tokenizer = write_tokenizer(folder, transformers.Qwen2TokenizerFast)
    processor: Any
    if family.name == "qwen2_5_vl":
        processor = transformers.Qwen2_5_VLProcessor(
            image_processor=transformers.Qwen2VLImageProcessorFast(
                min_pixels=56 * 56, max_pixels=28 * 28 * 16
            ),
            tokenizer=tokenizer,
            video_processor=transformers.Qwen2VLVideoProcessor(),
        )
    else:
        from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

        processor = transformers.Qwen3VLProcessor(
            image_processor=transformers.Qwen2VLImageProcessorFast(
                patch_size=16, size={"shortest_edge": 4096, "longest_edge": 32768}
            ),
            tokenizer=tokenizer,
            video_processor=Qwen3VLVideoProcessor(),
        )
    processor.save_pretrained(folder)
    return states


def chameleon(family: Family, dtype: torch.dtype, folder: Path) -> list[torch.Tensor]:
    states = plain(family, dtype, folder)
    tokenizer = write_tokenizer(folder, transformers.LlamaTokenizerFast)
    transformers.ChameleonProcessor(
        transformers.ChameleonImageProcessor(
            size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
        ),
        tokenizer,
        image_seq_length=4,
    ).save_pretrained(folder)
    return states


def llama4_scaling(family: Family, dtype: torch.dtype, folder: Path) -> list[torch.Tensor]:
    """DeepSeek-V3 whose queries grow with the position (Mistral-Large-3 has it).

    transformers' DeepSeek-V3 doesn't know it. The factor depends on the position alone, and
    what follows the query projection is linear, so a hook on the projection is enough.
    """
    scaling = family.config["llama_4_scaling"]
    model = model_of(family, dtype)

    def scale(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(output.shape[1])
        past = torch.floor(positions / scaling["original_max_position_embeddings"])
        return output * (1 + scaling["beta"] * torch.log(1 + past))[None, :, None]

    for layer in decoder_layers(model):
        layer.self_attn.q_b_proj.register_forward_hook(scale)  # type: ignore[union-attr, operator]
    states = reference(model)
    model.to(dtype).save_pretrained(folder)
    write_tokenizer(folder)
    return states


def kimi_k2(family: Family, dtype: torch.dtype, folder: Path) -> list[torch.Tensor]:
    states = plain(family, dtype, folder)
    edit_json(
        folder / "config.json",
        model_type="kimi_k2",
        auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    )
    remote_code(folder, "configuration_deepseek.py")
    remote_tokenizer(folder)
    return states


VISION = {
    "patch_size": 14,
    "init_pos_emb_height": 8,
    "init_pos_emb_width": 8,
    "init_pos_emb_time": 4,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "intermediate_size": 128,
    "mm_hidden_size": 64,
}


def kimi_vision_weights(text_hidden: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Random weights of Kimi-K2.5's vision tower: text prompts don't use it, loading does."""
    hidden, inner = VISION["hidden_size"], VISION["intermediate_size"]
    merged = hidden * 4
    shapes: dict[str, tuple[int, ...]] = {
        "vision_tower.patch_embed.proj.weight": (hidden, 3, 14, 14),
        "vision_tower.patch_embed.proj.bias": (hidden,),
        "vision_tower.patch_embed.pos_emb.weight": (8, 8, hidden),
        "vision_tower.encoder.final_layernorm.weight": (hidden,),
        "vision_tower.encoder.final_layernorm.bias": (hidden,),
        "mm_projector.pre_norm.weight": (hidden,),
        "mm_projector.pre_norm.bias": (hidden,),
        "mm_projector.proj.0.weight": (merged, merged),
        "mm_projector.proj.0.bias": (merged,),
        "mm_projector.proj.2.weight": (text_hidden, merged),
        "mm_projector.proj.2.bias": (text_hidden,),
    }
    block = "vision_tower.encoder.blocks.0."
    for name, rows, columns in (
        ("wqkv", 3 * hidden, hidden),
        ("wo", hidden, hidden),
        ("mlp.fc0", inner, hidden),
        ("mlp.fc1", hidden, inner),
    ):
        shapes[f"{block}{name}.weight"] = (rows, columns)
        shapes[f"{block}{name}.bias"] = (rows,)
    for name in ("norm0", "norm1"):
        shapes[f"{block}{name}.weight"] = (hidden,)
        shapes[f"{block}{name}.bias"] = (hidden,)
    generator = torch.Generator().manual_seed(5)
    for name, shape in shapes.items():
        yield name, torch.randn(shape, generator=generator) * 0.02


def kimi_k2_5(family: Family, dtype: torch.dtype, folder: Path) -> list[torch.Tensor]:
    return _kimi_k2_5(family, dtype, folder, int4=False)


def kimi_k2_5_int4(family: Family, dtype: torch.dtype, folder: Path) -> list[torch.Tensor]:
    return _kimi_k2_5(family, dtype, folder, int4=True)


def _kimi_k2_5(
    family: Family, dtype: torch.dtype, folder: Path, *, int4: bool
) -> list[torch.Tensor]:
    model = model_of(family, dtype)
    packed = quantise(model, dtype, only=".mlp.experts.") if int4 else {}
    states = reference(model)
    tensors = dict(model.state_dict())
    for name in packed:
        tensors.pop(name.removesuffix("_packed"), None)
    tensors |= packed
    tensors = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    tensors |= kimi_vision_weights(SIZES["hidden_size"])
    save_weights(folder, tensors, dtype)
    text = model.config.to_dict()
    text |= {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2"}
    text |= {"dtype": dtype_name(dtype)}
    if int4:
        # As the real checkpoint has it: attention, the dense layer, shared experts and the
        # output stay in 16 bits.
        ignore = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"]
        ignore += ["re:.*mlp\\.(gate|up|gate_up|down)_proj.*"]
        text["quantization_config"] = quantisation_config(ignore)
    edit_json(
        folder / "config.json",
        architectures=["KimiK25ForConditionalGeneration"],
        model_type="kimi_k25",
        dtype=dtype_name(dtype),
        media_placeholder_token_id=TOKEN_ID["<|media_pad|>"],
        pad_token_id=0,
        auto_map={"AutoConfig": "configuration_kimi_k25.KimiK25Config"},
        text_config=text,
        vision_config=VISION,
        use_unified_vision_chunk=True,
        tie_word_embeddings=False,
    )
    edit_json(
        folder / "preprocessor_config.json",
        auto_map={"AutoImageProcessor": "kimi_k25_vision_processing.KimiK25VisionProcessor"},
        image_processor_type="KimiK25VisionProcessor",
    )
    remote_code(folder, "configuration_kimi_k25.py", "kimi_k25_vision_processing.py")
    write_tokenizer(folder)
    remote_tokenizer(folder)
    return states


GROUP = 32


def quantise(
    model: nn.Module, dtype: torch.dtype, *, only: str = ""
) -> dict[str, torch.Tensor]:
    """Round the linear layers to 4 bits in groups; return the packed tensors by name.

    The model's own weights become the dequantised ones, as a 16-bit kernel would see them.
    """
    try:
        from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
    except ImportError:  # 0.13
        from compressed_tensors.compressors.quantized_compressors.pack_quantized import (
            pack_to_int32,
        )

    packed: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or name.endswith("lm_head") or only not in name:
            continue
        rows, columns = module.weight.shape
        groups = module.weight.data.view(rows, columns // GROUP, GROUP)
        scale = (groups.abs().amax(-1) / 7.5).to(dtype).float()
        rounded = torch.clamp(torch.round(groups / scale[..., None]), -8, 7)
        dequantised = (rounded * scale[..., None]).view(rows, columns)
        module.weight.data = dequantised.to(dtype).float()
        integers = rounded.view(rows, columns).to(torch.int8)
        packed[f"{name}.weight_packed"] = pack_to_int32(integers, 4)
        packed[f"{name}.weight_scale"] = scale.to(dtype)
        packed[f"{name}.weight_shape"] = torch.tensor([rows, columns])
    return packed


def quantisation_config(ignore: list[str]) -> dict[str, Any]:
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": GROUP,
        "dynamic": False,
        "actorder": None,
        "observer": "minmax",
        "block_structure": None,
    }
    group = {
        "targets": ["Linear"],
        "input_activations": None,
        "output_activations": None,
        "weights": weights,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "ignore": ignore,
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
    }


def llama_int4(family: Family, dtype: torch.dtype, folder: Path) -> list[torch.Tensor]:
    model = model_of(family, dtype)
    packed = quantise(model, dtype)
    states = reference(model)
    tensors = dict(model.state_dict())
    for name in packed:
        tensors.pop(name.removesuffix("_packed"), None)
    save_weights(folder, tensors | packed, dtype)
    config = model.config.to_dict() | {
        "architectures": [family.model],
        "dtype": dtype_name(dtype),
        "quantization_config": quantisation_config(["lm_head"]),
    }
    edit_json(folder / "config.json", **config)
    write_tokenizer(folder)
    return states


def chatglm(family: Family, dtype: torch.dtype, folder: Path) -> list[torch.Tensor]:
    """GLM's weights under the names, and with the config, that ChatGLM's own code has."""
    model = model_of(family, dtype)
    states = reference(model)
    config, weights = model.config, model.state_dict()
    tensors = {
        "transformer.embedding.word_embeddings.weight": weights["model.embed_tokens.weight"],
        "transformer.encoder.final_layernorm.weight": weights["model.norm.weight"],
        "transformer.output_layer.weight": weights["lm_head.weight"],
    }
    for index in range(config.num_hidden_layers):
        old, new = f"model.layers.{index}.", f"transformer.encoder.layers.{index}."
        for theirs, ours in (
            ("input_layernorm", "input_layernorm"),
            ("post_attention_layernorm", "post_attention_layernorm"),
            ("self_attention.dense", "self_attn.o_proj"),
            ("mlp.dense_h_to_4h", "mlp.gate_up_proj"),
            ("mlp.dense_4h_to_h", "mlp.down_proj"),
        ):
            tensors[f"{new}{theirs}.weight"] = weights[f"{old}{ours}.weight"]
        for kind in ("weight", "bias"):
            tensors[f"{new}self_attention.query_key_value.{kind}"] = torch.cat(
                [weights[f"{old}self_attn.{name}_proj.{kind}"] for name in "qkv"]
            )
    save_weights(folder, tensors, dtype)
    edit_json(
        folder / "config.json",
        architectures=[family.architecture],
        model_type="chatglm",
        auto_map={"AutoConfig": "configuration_chatglm.ChatGLMConfig"},
        dtype=dtype_name(dtype),
        num_layers=config.num_hidden_layers,
        padded_vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        kv_channels=config.head_dim,
        num_attention_heads=config.num_attention_heads,
        multi_query_attention=True,
        multi_query_group_num=config.num_key_value_heads,
        seq_length=config.max_position_embeddings,
        layernorm_epsilon=config.rms_norm_eps,
        rmsnorm=True,
        post_layer_norm=True,
        add_bias_linear=False,
        add_qkv_bias=True,
        original_rope=True,
        tie_word_embeddings=False,
        bos_token_id=SIZES["bos_token_id"],
        eos_token_id=SIZES["eos_token_id"],
        pad_token_id=SIZES["pad_token_id"],
    )
    remote_code(folder, "configuration_chatglm.py")
    write_tokenizer(folder)
    return states


def minimax_m2(family: Family, dtype: torch.dtype, folder: Path) -> list[torch.Tensor]:
    """MiniMax-M2 written out in torch, from the published description of the model."""
    hidden, inner, layers = SIZES["hidden_size"], 64, SIZES["num_hidden_layers"]
    heads, kv_heads, head = 4, 2, 32
    rotated, experts, active, eps, theta = 16, 8, 2, 1e-6, 5e6
    generator = torch.Generator().manual_seed(9)

    def matrix(*shape: int, scale: float = 0.06) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(dtype).float()

    def norm_weight(size: int) -> torch.Tensor:
        return (1 + torch.randn(size, generator=generator) * 0.1).to(dtype).float()

    weights = {
        "model.embed_tokens.weight": matrix(registry.VOCABULARY, hidden),
        "lm_head.weight": matrix(registry.VOCABULARY, hidden),
        "model.norm.weight": norm_weight(hidden),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        attention, moe = f"{prefix}self_attn.", f"{prefix}block_sparse_moe."
        weights |= {
            f"{attention}q_proj.weight": matrix(heads * head, hidden),
            f"{attention}k_proj.weight": matrix(kv_heads * head, hidden),
            f"{attention}v_proj.weight": matrix(kv_heads * head, hidden),
            f"{attention}o_proj.weight": matrix(hidden, heads * head),
            f"{attention}q_norm.weight": norm_weight(heads * head),
            f"{attention}k_norm.weight": norm_weight(kv_heads * head),
            f"{prefix}input_layernorm.weight": norm_weight(hidden),
            f"{prefix}post_attention_layernorm.weight": norm_weight(hidden),
            f"{moe}gate.weight": matrix(experts, hidden),
            f"{moe}e_score_correction_bias": matrix(experts, scale=0.05),
        }
        for expert in range(experts):
            weights |= {
                f"{moe}experts.{expert}.w1.weight": matrix(inner, hidden),
                f"{moe}experts.{expert}.w3.weight": matrix(inner, hidden),
                f"{moe}experts.{expert}.w2.weight": matrix(hidden, inner),
            }

    def rms(x: torch.Tensor, name: str) -> torch.Tensor:
        return (
            x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weights[f"{name}.weight"]
        )

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ weights[f"{name}.weight"].T

    def forward(prompt: list[int]) -> torch.Tensor:
        n = len(prompt)
        frequency = 1 / (theta ** (torch.arange(0, rotated, 2).float() / rotated))
        angle = torch.outer(torch.arange(n).float(), frequency)
        cos, sin = (torch.cat([t, t], -1)[:, None] for t in (angle.cos(), angle.sin()))

        def rope(x: torch.Tensor) -> torch.Tensor:
            turned, rest = x[..., :rotated], x[..., rotated:]
            half = rotated // 2
            other = torch.cat([-turned[..., half:], turned[..., :half]], -1)
            return torch.cat([turned * cos + other * sin, rest], -1)

        mask = torch.full((n, n), -math.inf).triu(1)
        x = weights["model.embed_tokens.weight"][torch.tensor(prompt)]
        states = []
        for layer in range(layers):
            prefix = f"model.layers.{layer}."
            attention, moe = f"{prefix}self_attn.", f"{prefix}block_sparse_moe."
            y = rms(x, f"{prefix}input_layernorm")
            q = rms(linear(y, f"{attention}q_proj"), f"{attention}q_norm").view(n, heads, head)
            k = rms(linear(y, f"{attention}k_proj"), f"{attention}k_norm").view(
                n, kv_heads, head
            )
            v = linear(y, f"{attention}v_proj").view(n, kv_heads, head)
            q, k = rope(q), rope(k)
            k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
            scores = (torch.einsum("qhd,khd->hqk", q, k) * head**-0.5 + mask).softmax(-1)
            mixed = torch.einsum("hqk,khd->qhd", scores, v).reshape(n, -1)
            x = x + linear(mixed, f"{attention}o_proj")
            y = rms(x, f"{prefix}post_attention_layernorm")
            affinity = torch.sigmoid(linear(y, f"{moe}gate"))
            chosen = affinity + weights[f"{moe}e_score_correction_bias"]
            top = chosen.topk(active, -1).indices
            share = affinity.gather(1, top)
            share = share / share.sum(-1, keepdim=True)
            for expert in range(experts):
                name = f"{moe}experts.{expert}."
                gate = nn.functional.silu(linear(y, f"{name}w1"))
                out = linear(gate * linear(y, f"{name}w3"), f"{name}w2")
                x = x + out * (share * (top == expert)).sum(-1, keepdim=True)
            states.append(x)
        return torch.stack(states)

    states = [forward(prompt) for prompt in prompts()]
    save_weights(folder, weights, dtype)
    write_tokenizer(folder)
    edit_json(
        folder / "config.json",
        architectures=["MiniMaxM2ForCausalLM"],
        model_type="minimax_m2",
        auto_map={"AutoConfig": "configuration_minimax_m2.MiniMaxM2Config"},
        dtype=dtype_name(dtype),
        vocab_size=registry.VOCABULARY,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head,
        rotary_dim=rotated,
        partial_rotary_factor=rotated / head,
        rope_theta=theta,
        num_local_experts=experts,
        num_experts_per_tok=active,
        rms_norm_eps=eps,
        max_position_embeddings=SIZES["max_position_embeddings"],
        scoring_func="sigmoid",
        use_routing_bias=True,
        use_qk_norm=True,
        qk_norm_type="per_layer",
        hidden_act="silu",
        num_mtp_modules=0,
        use_mtp=False,
        tie_word_embeddings=False,
        bos_token_id=SIZES["bos_token_id"],
        eos_token_id=SIZES["eos_token_id"],
    )
    remote_code(folder, "configuration_minimax_m2.py")
    return states


WRITERS: dict[str, Callable[[Family, torch.dtype, Path], list[torch.Tensor]]] = {
    writer.__name__: writer
    for writer in (
        plain,
        qwen_vl,
        chameleon,
        llama4_scaling,
        kimi_k2,
        kimi_k2_5,
        kimi_k2_5_int4,
        llama_int4,
        chatglm,
        minimax_m2,
    )
}
