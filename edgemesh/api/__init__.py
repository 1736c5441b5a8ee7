"""The OpenAI API without its sockets: what a request may say, and what an answer looks like.

In the order in which one request meets them: ``decode`` (bytes to a typed request), ``openai`` (its parameters),
``check`` (its values against the model), ``chat`` and ``text`` (to token ids), ``resolve`` (to choices that may be
submitted); then, per choice, ``detokenize``, ``stop``, ``stream`` and ``logprobs`` (token ids to text), ``replies`` and
``sse`` (to bytes). Responses and messages are translated to chats first (``translation``, ``responses_chat``,
``messages_chat``), and their answers are made of what a chat says (``made``, ``responses_events``,
``messages_events``). Every refusal is an ``errors.ApiError``. Nothing here reads a clock, a file or a socket.
"""
