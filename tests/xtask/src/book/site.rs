//! What mdBook has made: whether each link within the site leads to a file of it, and to an element
//! of that name.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context as _, Result};
use html5gum::{Token, Tokenizer};

/// How much was looked at.
#[derive(Debug, PartialEq, Eq)]
pub struct Counted {
    pub pages: usize,
    /// Within the site.
    pub links: usize,
}

/// What a page names and asks for.
#[derive(Default)]
struct Page {
    names: BTreeSet<String>,
    links: BTreeSet<String>,
}

/// Looks up the links of all pages of a site but those of others in the folder `others`, which may
/// be linked to; returns those that lead nowhere, too.
///
/// # Errors
/// When the file system fails.
pub fn check(folder: &Path, others: &Path) -> Result<(Counted, Vec<String>)> {
    let mut files = BTreeSet::new();
    walk(folder, Path::new(""), &mut files)?;
    let mut pages = BTreeMap::new();
    let is_read = |file: &&PathBuf| is_page(file) && !file.starts_with(others);
    for file in files.iter().filter(is_read) {
        let path = folder.join(file);
        let text =
            fs::read_to_string(&path).with_context(|| format!("Cannot read {}", path.display()))?;
        pages.insert(file, read(&text));
    }
    let mut links = 0;
    let mut dead = Vec::new();
    for (from, page) in &pages {
        for link in page.links.iter().filter(|link| !is_elsewhere(link)) {
            links += 1;
            let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
            let to = match path {
                "" => Some((*from).clone()),
                path => plain(&from.with_file_name(path)),
            };
            let is_there = to.is_some_and(|to| {
                let is_others = anchor.is_empty() || to.starts_with(others);
                let names = || pages.get(&to).is_some_and(|to| to.names.contains(anchor));
                files.contains(&to) && (is_others || names())
            });
            if !is_there {
                dead.push(format!("{}: {link}", from.display()));
            }
        }
    }
    let pages = pages.len();
    Ok((Counted { pages, links }, dead))
}

fn walk(root: &Path, folder: &Path, files: &mut BTreeSet<PathBuf>) -> Result<()> {
    let path = root.join(folder);
    let entries = fs::read_dir(&path).with_context(|| format!("Cannot read {}", path.display()))?;
    for entry in entries {
        let entry = entry?;
        let path = folder.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            walk(root, &path, files)?;
        } else {
            files.insert(path);
        }
    }
    Ok(())
}

fn is_page(path: &Path) -> bool {
    path.extension().is_some_and(|end| end == "html")
}

/// Whether a link leads out of the site: it begins with a scheme (RFC 3986, 3.1).
fn is_elsewhere(link: &str) -> bool {
    let is_part = |c: char| c.is_ascii_alphanumeric() || "+-.".contains(c);
    link.split_once(':')
        .is_some_and(|(scheme, _)| !scheme.is_empty() && scheme.chars().all(is_part))
}

/// A path without `..`; none where it leads out of the site.
fn plain(path: &Path) -> Option<PathBuf> {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::Normal(part) => plain.push(part),
            Component::CurDir => {}
            Component::ParentDir => plain.pop().then_some(())?,
            _ => return None,
        }
    }
    Some(plain)
}

/// The names and links of a page: `id` of any element; `href` and `src`.
fn read(text: &str) -> Page {
    let mut page = Page::default();
    for Ok(token) in Tokenizer::new(text) {
        let Token::StartTag(tag) = token else {
            continue;
        };
        for (name, value) in &tag.attributes {
            let value = String::from_utf8_lossy(value).into_owned();
            match &name[..] {
                b"id" => page.names.insert(value),
                b"href" | b"src" => page.links.insert(value),
                _ => continue,
            };
        }
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_that_lead_nowhere_are_found() {
        let site = tempfile::tempdir().unwrap();
        let put = |name: &str, text: &str| {
            let path = site.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        put(
            "a.html",
            "<h1 id=b>B</h1> <a href='c/d.html#e'>d</a> <img src=\"f.svg\">",
        );
        put(
            "c/d.html",
            "<p id=\"e\"><a href=../a.html#b>b</a> <a href=#e>e</a> <a href=https://g>g</a>",
        );
        put("f.svg", "<svg/>");
        put("others/g.html", "<a href=nowhere.html>n</a>");
        let check = || check(site.path(), Path::new("others"));
        let (counted, dead) = check().unwrap();
        assert_eq!((counted, dead), (Counted { pages: 2, links: 4 }, vec![]));
        put(
            "c/h.html",
            "<a href=../a.html#i><a href=d.md><a href=../../a.html><a href=#>",
        );
        let (_, dead) = check().unwrap();
        let expected = ["../../a.html", "../a.html#i", "d.md"];
        let expected = expected.map(|link| format!("c/h.html: {link}"));
        assert_eq!(dead, expected);
    }
}
