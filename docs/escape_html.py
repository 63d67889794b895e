"""Shows `<mask>` in a docstring as it stands: Markdown would take it for HTML. mkdocs calls `on_config`."""

from markdown import Markdown
from markdown.extensions import Extension


class EscapeHtml(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.preprocessors.deregister("html_block")
        md.inlinePatterns.deregister("html")


def on_config(config):
    config.markdown_extensions.append(EscapeHtml())
