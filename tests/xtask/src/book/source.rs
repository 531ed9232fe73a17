//! What mdBook reads: the documents at paths of their own, with links that lead there.
//!
//! A document of `docs` is at the top of the site, and so is the `README.md` of a folder, by the
//! folder's name. Other files that documents link to are in `files`, as they are.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context as _, Result, ensure};

use crate::markdown::{fenced, targets};

/// The list of the pages, in the checkout.
const SUMMARY: &str = "docs/SUMMARY.md";

/// Writes all that mdBook reads to a folder, where the pages of `programs` are in `reference`, and
/// others, by title and name, in `api`.
///
/// # Errors
/// When a document of `docs` is no page, a page links to a document that is none, or the file
/// system fails.
pub fn lay_out(root: &Path, programs: &[String], api: &[(&str, &str)], to: &Path) -> Result<()> {
    let summary = read(root, Path::new(SUMMARY))?;
    let (mut text, pages) = translate(Path::new(SUMMARY), &summary);
    for entry in fs::read_dir(root.join("docs")).context("Cannot read docs")? {
        let page = Path::new("docs").join(entry?.file_name());
        let is_page = page.extension().is_some_and(|end| end == "md");
        ensure!(
            !is_page || page == Path::new(SUMMARY) || pages.contains(&page),
            "{} is not in {SUMMARY}",
            page.display()
        );
    }
    text.push_str("\n# Programs\n\n");
    for name in programs {
        text.push_str(&format!("* [{name}](reference/{name}.md)\n"));
    }
    text.push_str("\n# Programming\n\n");
    for (title, name) in api {
        text.push_str(&format!("* [{title}]({}/{name})\n", super::api::FOLDER));
    }
    write(to, Path::new("SUMMARY.md"), text.as_bytes())?;
    for page in &pages {
        let (text, linked) = translate(page, &read(root, page)?);
        write(to, &place(page), text.as_bytes())?;
        for other in linked.difference(&pages) {
            ensure!(
                other.extension().is_none_or(|end| end != "md"),
                "{} links to {}, which is not in {SUMMARY}",
                page.display(),
                other.display()
            );
            let from = root.join(other);
            let bytes = fs::read(&from)
                .with_context(|| format!("Cannot read {}, which is linked to", from.display()))?;
            write(to, &place(other), &bytes)?;
        }
    }
    Ok(())
}

fn read(root: &Path, path: &Path) -> Result<String> {
    let path = root.join(path);
    fs::read_to_string(&path).with_context(|| format!("Cannot read {}", path.display()))
}

fn write(to: &Path, path: &Path, bytes: &[u8]) -> Result<()> {
    let path = to.join(path);
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).with_context(|| format!("Cannot make {}", folder.display()))?;
    }
    fs::write(&path, bytes).with_context(|| format!("Cannot write {}", path.display()))
}

/// A document with the links of the site, and the files of the checkout that it links to.
fn translate(path: &Path, text: &str) -> (String, BTreeSet<PathBuf>) {
    let here = place(path);
    let mut linked = BTreeSet::new();
    let mut translated = String::new();
    for (_, line, in_fence) in fenced(text) {
        let mut done = 0;
        for range in targets(line).filter(|_| !in_fence) {
            let (file, anchor) = line[range.clone()]
                .split_once('#')
                .map_or((&line[range.clone()], None), |(f, a)| (f, Some(a)));
            translated.push_str(&line[done..range.start]);
            if !file.is_empty() {
                let file = plain(&path.with_file_name(file));
                translated.push_str(&between(&here, &place(&file)));
                linked.insert(file);
            }
            if let Some(anchor) = anchor {
                translated.push('#');
                translated.push_str(anchor);
            }
            done = range.end;
        }
        translated.push_str(&line[done..]);
        translated.push('\n');
    }
    (translated, linked)
}

/// A path without `..`.
fn plain(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => {
                plain.pop();
            }
            part => plain.push(part),
        }
    }
    plain
}

/// Where a file of the checkout is in the site.
fn place(path: &Path) -> PathBuf {
    if path.extension().is_none_or(|end| end != "md") {
        return Path::new("files").join(path);
    }
    let folder = path.parent().and_then(Path::file_name);
    match (folder, path.ends_with("README.md")) {
        (Some(folder), true) => Path::new(folder).with_extension("md"),
        _ => path.strip_prefix("docs").unwrap_or(path).to_owned(),
    }
}

/// The link from one file of the site to another.
fn between(from: &Path, to: &Path) -> String {
    let up = "../".repeat(from.components().count().saturating_sub(1));
    format!("{up}{}", to.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn translated(path: &str, text: &str) -> String {
        translate(Path::new(path), text).0
    }

    #[test]
    fn links_of_the_checkout_become_links_of_the_site() {
        let text = "[a](../ARCHITECTURE.md#glossary) [b](blk.md), [c](#d)\n[e](https://f.md)\n";
        assert_eq!(
            translated("docs/io.md", text),
            "[a](ARCHITECTURE.md#glossary) [b](blk.md), [c](#d)\n[e](https://f.md)\n"
        );
        assert_eq!(
            translated("ARCHITECTURE.md", "[a](docs/io.md)"),
            "[a](io.md)\n"
        );
        let (text, linked) = translate(
            Path::new("docs/lend.md"),
            "[a](../qemu-configs/README.md#x) [b](../qemu-configs/lend.toml)",
        );
        assert_eq!(
            text,
            "[a](qemu-configs.md#x) [b](files/qemu-configs/lend.toml)\n"
        );
        let linked: Vec<_> = linked.iter().map(|path| path.to_str().unwrap()).collect();
        assert_eq!(linked, ["qemu-configs/README.md", "qemu-configs/lend.toml"]);
    }

    #[test]
    fn what_is_fenced_has_no_links() {
        let text = "```\n[a](../b.md)\n```\n";
        assert_eq!(translated("docs/io.md", text), text);
    }

    #[test]
    fn a_document_that_is_no_page_is_found() {
        let root = tempfile::tempdir().unwrap();
        let to = tempfile::tempdir().unwrap();
        let put = |name: &str, text: &str| {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        put("docs/SUMMARY.md", "* [a](a.md)\n");
        put("docs/a.md", "[b](../b.c)\n");
        put("b.c", "int b;\n");
        let api = [("C", "c.md")];
        let lay_out = || lay_out(root.path(), &["farlane-c".into()], &api, to.path());
        lay_out().unwrap();
        let summary = fs::read_to_string(to.path().join("SUMMARY.md")).unwrap();
        assert!(summary.contains("(reference/farlane-c.md)"), "{summary}");
        assert!(summary.contains("[C](api/c.md)"), "{summary}");
        assert_eq!(fs::read(to.path().join("files/b.c")).unwrap(), b"int b;\n");
        put("docs/a.md", "[b](../b.md)\n");
        let error = lay_out().unwrap_err().to_string();
        assert_eq!(
            error,
            "docs/a.md links to b.md, which is not in docs/SUMMARY.md"
        );
        put("docs/d.md", "");
        let error = lay_out().unwrap_err().to_string();
        assert_eq!(error, "docs/d.md is not in docs/SUMMARY.md");
    }
}
