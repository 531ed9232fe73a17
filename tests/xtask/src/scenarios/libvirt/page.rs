//! The page about libvirt: what stands in its fenced blocks is what the scenario uses.

use std::fs;

use anyhow::{Context as _, Result};
use farlane_kit::workspace::Workspace;

/// The page.
const PAGE: &str = "docs/libvirt.md";

/// Where a fenced block begins and ends.
const FENCE: &str = "```";

/// Its text.
pub struct Page(String);

impl Page {
    pub fn read(workspace: &Workspace) -> Result<Self> {
        let path = workspace.root().join(PAGE);
        let text = fs::read_to_string(path).with_context(|| format!("Cannot read {PAGE}"))?;
        Ok(Self(text))
    }

    /// The element of libvirt's XML that begins with `start`.
    pub fn xml(&self, start: &str) -> Result<&str> {
        self.block("xml", None, |block| block.starts_with(start))
            .with_context(|| format!("{PAGE} has no XML that begins with {start}"))
    }

    /// The file whose path stands in the line before it.
    pub fn file(&self, path: &str) -> Result<&str> {
        self.block("toml", Some(path), |_| true)
            .with_context(|| format!("{PAGE} has no file {path}"))
    }

    /// A block of a language that is so, the first one behind a text.
    fn block(
        &self,
        language: &str,
        behind: Option<&str>,
        is: impl Fn(&str) -> bool,
    ) -> Option<&str> {
        let text = match behind {
            Some(behind) => self.0.split_once(behind)?.1,
            None => &self.0,
        };
        let begins = text.split(FENCE).skip(1).step_by(2);
        let mut blocks = begins.filter_map(|block| {
            let (found, block) = block.split_once('\n')?;
            (found == language).then_some(block)
        });
        blocks.find(|block| is(block))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_found_by_how_they_begin_or_by_what_stands_before() {
        let text = "`/a`:\n```toml\none\n```\n```xml\n<disk/>\n```\n`/b`:\n```toml\ntwo\n```\n";
        let page = Page(text.to_owned());
        assert_eq!(page.xml("<disk").unwrap(), "<disk/>\n");
        assert_eq!(page.file("`/a`").unwrap(), "one\n");
        assert_eq!(page.file("`/b`").unwrap(), "two\n");
        assert!(page.xml("<inter").is_err() && page.file("`/c`").is_err());
    }
}
