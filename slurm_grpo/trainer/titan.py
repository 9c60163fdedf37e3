"""The parts of torchtitan that are built on, imported once torchtitan knows the device.

torchtitan fixes its device when `torchtitan.tools.utils` is first imported and takes CUDA when it
finds no accelerator at all; every other module copies that value. So the others must be imported
through here. torchtitan's RL actors are never imported: they need Monarch.
"""

from __future__ import annotations

import torch
from torchtitan.tools import utils as titan_utils

if not torch.cuda.is_available():
    titan_utils.device_type = "cpu"
    titan_utils.device_module = torch.cpu

from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.distributed.utils import clip_grad_norm_, set_spmd_backend
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import FlexAttention, create_attention_mask
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.protocols.module import Module
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

# The default backend, `spmd_types`, fails with torch 2.13 on more than one rank.
set_spmd_backend("partial_dtensor")
