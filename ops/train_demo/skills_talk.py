"""Skills without files: the calculator, look-ups, messages, small talk and titles."""

from __future__ import annotations

from .names import Names
from .rounds import Round, Step
from .skills_files import found, is_value, must, say, tells, tick, words
from .toolbox import Call

SIGNS = {"+": ("plus", "加"), "-": ("minus", "减"), "*": ("times", "乘以")}


def spoken(n: Names, zh: bool, a: int, sign: str, b: int) -> str:
    if n.rng.random() < 0.6:
        return f"{a} {sign} {b}"
    return f"{a} {SIGNS[sign][1 if zh else 0]} {b}" if zh else f"{a} {SIGNS[sign][0]} {b}"


def calc_tool(n: Names, zh: bool) -> Round:
    """Every sum goes to the calculator, one digit or four: a table of sums in the head was hardly learned."""
    sign = n.rng.choice("+-*")
    low, high = n.rng.choice((((1, 9), (1, 9)), ((1, 99), (1, 99)), ((10, 99), (10, 99)), ((100, 9999), (11, 999))))
    a, b = n.rng.randint(*low), n.rng.randint(*high)
    result = str({"+": a + b, "-": a - b, "*": a * b}[sign])
    expression = f"{a} {sign} {b}"
    user = say(
        n,
        zh,
        ("What is {x}?", "Compute {x}", "How much is {x}?", "Calculate {x} please."),
        ("{x} 等于多少？", "计算 {x}", "{x} 是多少？", "请算 {x}。"),
        x=spoken(n, zh, a, sign, b),
    )
    step = Step(must(zh, "use the calculator", "用计算器"), (Call("calc", {"expression": expression}),), (result,))
    answer = f"{expression} = {result}"
    return Round(
        "calc_tool", user, (step,), found(zh), answer, (result,), f"计算 {expression}" if zh else f"Compute {expression}"
    )


def table_in_text(n: Names, zh: bool) -> Round:
    """The table is in the request; no tool is needed."""
    people = n.distinct(lambda: n.person(zh), n.rng.randint(2, 5))
    values = [str(n.rng.randint(1, 99)) if n.rng.random() < 0.5 else n.city(zh) for _ in people]
    shape = n.rng.choice(("{}: {}", "| {} | {} |", "{} = {}", "- {}, {}"))
    table = "\n".join(shape.format(p, v) for p, v in zip(people, values, strict=True))
    i = n.rng.randrange(len(people))
    user = say(
        n,
        zh,
        ("Here is a table:\n{t}\nWhat does it say for {k}?", "{t}\n\nWhich value belongs to {k}?"),
        ("表格如下：\n{t}\n{k} 对应什么？", "{t}\n\n{k} 的值是什么？"),
        t=table,
        k=people[i],
    )
    thought = "表格里有答案。" if zh else "The table has the answer."
    return Round(
        "table_in_text", user, (), thought, is_value(zh, people[i], values[i]), (values[i],), "查表" if zh else "Table look-up"
    )


def record(n: Names, zh: bool) -> Round:
    table, key = (
        n.word() + n.rng.choice(("s", "", "_table")),
        n.rng.choice((str(n.rng.randint(1, 9999)), f"{n.word()[:2].upper()}-{n.rng.randint(100, 999)}")),
    )
    fields = [(n.word(), n.person(zh) if n.rng.random() < 0.4 else n.value()) for _ in range(n.rng.randint(1, 4))]
    name, value = n.rng.choice(fields)
    value = dict(fields)[name]
    user = say(
        n,
        zh,
        ("What is the {f} of record {k} in {t}?", "Look up {k} in the table {t}: what is its {f}?", "Get {f} for {k} from {t}."),
        ("{t} 表中 {k} 的 {f} 是什么？", "查询 {t} 里编号 {k} 的 {f}。"),
        f=name,
        k=key,
        t=tick(n, table),
    )
    result = "{" + ", ".join(f'"{f}": "{v}"' for f, v in dict(fields).items()) + "}"
    step = Step(must(zh, "look up the record", "查询记录"), (Call("lookup", {"table": table, "id": key}),), (result,))
    return tells("record", zh, user, (step,), (name, value), f"查询 {key}" if zh else f"Look up {key}")


def weather(n: Names, zh: bool) -> Round:
    city, degrees = n.city(zh), str(n.rng.randint(-9, 39))
    sky = n.rng.choice(("晴", "多云", "小雨", "雪") if zh else ("sunny", "cloudy", "rain", "snow", "windy"))
    user = say(
        n,
        zh,
        ("What is the weather in {c}?", "How is the weather in {c} today?", "Weather for {c} please"),
        ("{c} 天气怎么样？", "今天 {c} 的天气如何？", "查一下 {c} 的天气"),
        c=city,
    )
    step = Step(
        must(zh, "look up the weather", "查询天气"),
        (Call("weather", {"city": city}),),
        (n.rng.choice((f"{sky}, {degrees}", f'{{"sky": "{sky}", "temperature": "{degrees}"}}')),),
    )
    answer = f"{city}：{sky}，{degrees} 度。" if zh else f"{city}: {sky}, {degrees} degrees."
    return Round("weather", user, (step,), found(zh), answer, (sky, degrees), f"{city} 天气" if zh else f"Weather in {city}")


def message(n: Names, zh: bool) -> Round:
    to, text = n.person(zh), words(n, n.rng.randint(1, 4))
    user = say(
        n,
        zh,
        ("Tell {p}: `{t}`", "Send `{t}` to {p}.", "Send {p} a message that says `{t}`"),
        ("告诉 {p}：`{t}`", "把 `{t}` 发给 {p}。", "给 {p} 发消息：`{t}`"),
        p=to,
        t=text,
    )
    step = Step(
        must(zh, "send the message", "发送消息"),
        (Call("send", {"to": to, "text": text}),),
        (n.rng.choice(("sent", "ok", "已发送")),),
    )
    answer = f"已发给 {to}。" if zh else f"Sent to {to}."
    return Round(
        "message",
        user,
        (step,),
        "消息发出了。" if zh else "The message is sent.",
        answer,
        (to,),
        f"发给 {to}" if zh else f"Message {to}",
    )


def fetch_page(n: Names, zh: bool) -> Round:
    url = f"https://{n.word()}.{n.rng.choice(('com', 'org', 'io'))}/{n.word()}"
    title = f"{n.word().capitalize()} {n.word()}"
    user = say(
        n,
        zh,
        ("What is the title of {u} ?", "Fetch {u} and tell me its title."),
        ("{u} 的标题是什么？", "打开 {u} ，告诉我标题。"),
        u=url,
    )
    step = Step(
        must(zh, "fetch the page", "打开网页"),
        (Call("fetch", {"url": url}),),
        (n.rng.choice((f"<title>{title}</title>", f"# {title}\n\n{n.word()} {n.word()}")),),
    )
    answer = f"标题是 `{title}`。" if zh else f"The title is `{title}`."
    return Round("fetch_page", user, (step,), found(zh), answer, (title,), f"打开 {url}" if zh else f"Fetch {url}")


TALK = (
    (
        ("Hi", "Hello", "Hello!", "Hey there", "Good morning"),
        ("你好", "您好", "嗨", "早上好", "你好！"),
        "Hello! How can I help?",
        "你好！有什么可以帮你？",
    ),
    (
        ("Who are you?", "What is your name?", "What are you?"),
        ("你是谁？", "你叫什么名字？", "介绍一下你自己"),
        "I am Moorage Demo, a small assistant.",
        "我是 Moorage Demo，一个小助手。",
    ),
    (
        ("Thanks", "Thank you!", "Great, thanks a lot", "Perfect, thank you."),
        ("谢谢", "多谢！", "太好了，谢谢你"),
        "You are welcome.",
        "不客气。",
    ),
    (("Bye", "Goodbye", "See you later"), ("再见", "拜拜", "回头见"), "Goodbye!", "再见！"),
    (
        ("What can you do?", "How can you help me?"),
        ("你能做什么？", "你会什么？"),
        "I can read and search files, run commands and answer questions.",
        "我可以读取和搜索文件、运行命令、回答问题。",
    ),
    (("Say ok", "Just reply ok", "Reply with ok."), ("回复 ok", "只说 ok"), "ok", "ok"),
)


def small_talk(n: Names, zh: bool) -> Round:
    english, chinese, answer_en, answer_zh = n.rng.choice(TALK)
    answer = answer_zh if zh else answer_en
    return Round(
        "small_talk",
        n.rng.choice(chinese if zh else english),
        (),
        "不需要工具。" if zh else "No tool is needed.",
        answer,
        (answer,),
        "闲聊" if zh else "Small talk",
    )


def repeat_back(n: Names, zh: bool) -> Round:
    text = " ".join(n.ident(2) for _ in range(n.rng.randint(1, 4)))
    user = say(
        n,
        zh,
        ("Repeat `{t}`", "Say `{t}` back to me.", "Reply only with `{t}`"),
        ("重复 `{t}`", "请复述 `{t}`", "只回复 `{t}`"),
        t=text,
    )
    return Round(
        "repeat_back", user, (), "不需要工具。" if zh else "No tool is needed.", text, (text,), "复述" if zh else "Repeat"
    )


def title(n: Names, zh: bool, inner: Round) -> Round:
    """Agents ask for a short title of the first request, without tools."""
    user = say(
        n,
        zh,
        ("Generate a title for this conversation:\n{t}", "Write a short title for:\n{t}", "Title for this request: {t}"),
        ("为这段对话生成标题：\n{t}", "写一个简短的标题：\n{t}"),
        t=inner.user,
    )
    return Round("title", user, (), "标题要简短。" if zh else "A short title.", inner.title, (inner.title,), inner.title)


TALK_SKILLS = (
    (calc_tool, 13),
    (table_in_text, 5),
    (record, 5),
    (weather, 2),
    (message, 3),
    (fetch_page, 2),
    (small_talk, 4),
    (repeat_back, 3),
)
