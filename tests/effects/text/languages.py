"""Texts of many scripts, with what makes them hard to cut: what is seen as one character
is often several, joined by some that are not seen.
"""
# ruff: noqa: RUF001 - letters that look like others are what this is about

from typing import Final

LANGUAGES: Final = {
    "combining marks": "e\u0301a\u0300\u0323o\u0302\u0301 Z\u0351\u0343\u036f\u0321a",
    "joined emoji": "👩\u200d👩\u200d👧\u200d👦 🏳\u200d🌈 👩🏽\u200d🚀 ❤\u200d🔥",
    "flags, key caps": "🇩🇪🇯🇵🇩 1\ufe0f\u20e3 🙂🙂 👍🏿 🏴\U000e0067\U000e0062\U000e007f",
    "Hindi": "नमस्ते दुनिया, क्षत्रिय ज्ञान श्रृंखला में हूँ। र्\u200dय",
    "Chinese": "你好，世界！深度學習推理引擎𠮷𡃁 “引號”",
    "Arabic": "مَرْحَبًا بِالعَالَم، ١٢٣ لا\u200cإله \u202bعربي\u202c",
    "Hebrew": "שָׁלוֹם עוֹלָם",
    "Korean": "안녕 세계 \u1112\u1161\u11ab\u1100\u1173\u11af",
    "Thai": "สวัสดีชาวโลก ก็น้ำ",
    "Tamil": "வணக்கம் உலகம் ஸ்ரீ",
    "Russian": "Привет, мир — ёжик й",
    "Vietnamese": "Xin chào thế giới — Tiếng Việt ặ ử",
    "mathematics": "∀x∈ℝ: ⌈𝔁⌉ = −⌊−𝔁⌋ ∑ᵢ √2 ≈ 1·41 𝟘𝟙",
    "the mark itself": "a\ufffdb \ufffd\ufffd",
    "what is not seen": "\ufeffa\u200bb\u2060c\u00adé\x00\x7f\r\n\t",
    "everything": "naïve 日本\u3099 नम👩\u200d👧 م e\u0301 𝄞\U0010ffff def f(x):\n",
}
