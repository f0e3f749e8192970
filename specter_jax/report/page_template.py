"""The page's HTML and CSS, a Jinja template."""

TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Specter in JAX: the evaluation</title>
<style>
body { font: 15px/1.5 Georgia, serif; color: #111; background: #fff; margin: 2rem auto;
  max-width: 64rem; padding: 0 1rem; }
h1, h2, h3, table, summary, nav { font-family: Helvetica, Arial, sans-serif; }
h1 { font-size: 1.7rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
h3 { font-size: .95rem; margin: 1.2rem 0 .3rem; color: #333; }
figure { margin: 0; } figure img { max-width: 100%; height: auto; }
figcaption { margin: .4rem 0 .6rem; }
.method, .absent { color: #444; } .absent { font-style: italic; }
table { border-collapse: collapse; font-size: 12px; margin: .5rem 0; }
th, td { border-bottom: 1px solid #ddd; padding: .15rem .6rem .15rem 0; text-align: left;
  vertical-align: top; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; } summary { cursor: pointer; font-size: 12px; color: #0072B2; }
nav a { color: #0072B2; margin-right: .8rem; white-space: nowrap; font-size: 13px; }
@media print { body { max-width: none; margin: 0; font-size: 11pt; } details, nav { display: none; }
  section { break-inside: avoid; } }
</style>
</head>
<body>
{% macro table(rows) %}
<div class="wide"><table>
<tr>{% for name in rows[0] %}<th>{{ name | heading }}</th>{% endfor %}</tr>
{% for row in rows[:max_rows] %}
<tr>{% for value in row.values() %}<td{% if value is number %} class="number"{% endif %}>
{{- value | cell }}</td>{% endfor %}</tr>
{% endfor %}
</table></div>
{% if rows | length > max_rows %}
<p class="absent">{{ max_rows }} of {{ rows | length }} rows; the JSON has all.</p>
{% endif %}
{% endmacro %}
<h1>Specter in JAX: the evaluation</h1>
<p>The figures of Wang et al., &ldquo;Specter: Fast MoE Inference via Quantization-Enabled
Multi-Step Speculative Offloading&rdquo;, measured on this implementation. Every number here stands
in <code>report.json</code> beside this page and was measured, unless it is marked as predicted; a
figure for which nothing was measured says so.</p>
<nav>{% for entry, shown in figures %}<a href="#{{ entry.section }}">{{ entry.number }}</a>
{% endfor %}</nav>

<h2>What it was measured on</h2>
<p>{{ meta.date }}: {{ meta.processor }}, {{ meta.cores }} cores, {{ meta.memory_gib }} GiB,
{{ meta.system }}, device &ldquo;{{ meta.device }}&rdquo;. Python {{ meta.python }}
{%- for name, version in meta.versions.items() %}, {{ name }} {{ version }}{% endfor %}.
{% if meta.load_average_before is not none and meta.load_average_after is not none %}
The load average was {{ meta.load_average_before }} before and {{ meta.load_average_after }} after
the measurement, its own work included{% if meta.load_average_before > meta.cores / 2 %}: other
programs were running, so times here are only comparable roughly{% endif %}.
{% endif %}</p>
<p>{{ settings.new_tokens }} new tokens from prompts cut to {{ settings.prompt_tokens }} tokens, in
{{ settings.dtype }}, greedy; prompts of {% for task in tasks %}{{ task.task }}
{{- ", " if not loop.last }}{% endfor %}.</p>
{% for result in results %}
<p>True size: <code>{{ result.file }}</code>
{%- for name, value in result.items() if name != "file" %}, {{ name | heading }}:
{% if value is mapping %}
{% for key, part in value.items() %}{{ key }} {{ part }}{{ ", " if not loop.last }}{% endfor %}
{%- else %}{{ value }}{% endif %}{% endfor %}.</p>
{% endfor %}
{% if results or traced %}
<p>True-size models have the tensor shapes of the published ones but weights stretched from trained
small models: routing and acceptance are real, yet a layer's choices resemble the layer before more
than in a published model, which favours policies that guess the next layer from this one.</p>
{% endif %}
{% if traced %}
<p>Routing of {{ traced | join(", ") }} was recorded on a GPU, from sampled text.</p>
{% endif %}
{% if models %}
<h3>Models run here</h3>
{{ table(models) }}
<p class="method">Small models' greedy text runs into loops, so acceptance and routing are theirs,
not a large model's.</p>
{% endif %}
<h3>Systems</h3>
<div class="wide"><table>
<tr><th>name</th><th>policy</th><th>depth</th><th>source</th><th>published</th><th>assumed</th></tr>
{% for system in systems %}
<tr><td>{{ system.name }}</td><td>{{ system.policy }}</td><td>{{ system.depth }}</td>
<td>{{ system.source }}</td><td>{{ system.published }}</td><td>{{ system.assumed }}</td></tr>
{% endfor %}
</table></div>

{% for entry, shown in figures %}
<section id="{{ entry.section }}">
<h2>{{ entry.number }}: {{ entry.title }}</h2>
<p class="method">{{ entry.method }}</p>
{% for one in shown %}
<h3>{{ one.heading }}</h3>
{% if one.panel is none %}
<p class="absent">Not measured.</p>
{% else %}
<figure><img src="{{ one.panel.data_uri }}" alt="{{ one.panel.sentence }}">
<figcaption>{{ one.panel.sentence }}</figcaption></figure>
{% if one.about %}
<p class="method">{{ one.about }}</p>
{% endif %}
<details><summary>numbers</summary>
{{ table(one.panel.rows) }}
</details>
{% endif %}
{% endfor %}
</section>
{% endfor %}
{% if sources %}
<section id="sources">
<h2>Sources of the true-size figures</h2>
<p class="method">Files of results and of recorded routing, with the commit and the day of the run;
a dash where the file does not say.</p>
{{ table(sources) }}
</section>
{% endif %}
</body>
</html>
"""
