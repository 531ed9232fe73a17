//! `cargo xtask book`: the documents as a site, made by mdBook.
//!
//! `docs/SUMMARY.md` says which pages it has. Links of the documents are those of the checkout;
//! [`source`] makes them links between pages. The pages of the reference are made by
//! `farlane-pages`, of what the man pages are made of; those about libfarlane by [`api`]. [`site`]
//! looks up every link of what mdBook has made.

mod api;
mod site;
mod source;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use farlane_kit::process::check_output;
use farlane_kit::progress;
use farlane_kit::workspace::Workspace;

use crate::cargo_tool;

/// The version of mdBook, for which the checks were written.
const MDBOOK: &str = "mdbook@0.5.4";

/// How it is built: soon, with a search, and without a server for pages that are being written.
const WORDS: &[&str] = &["--debug", "--no-default-features", "--features", "search"];

/// A file of each site that was made here, and of no other folder: mdBook empties where it writes.
const MARK: &str = ".farlane-book";

/// How long one step may take.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Its settings. What stands under `print` and `404` is left out, whose links are others.
const SETTINGS: &str = r#"[book]
title = "Farlane"
language = "en"

[build]
create-missing = false

[output.html]
input-404 = ""

[output.html.print]
enable = false
"#;

/// Makes the site, and says where it is.
pub fn run(workspace: &Workspace, out: Option<&Path>) -> Result<ExitCode> {
    let out = match out {
        Some(out) => std::path::absolute(out)
            .with_context(|| format!("There is no way to {}", out.display()))?,
        None => workspace.target().join("book"),
    };
    ensure_may_be_emptied(&out)?;
    let made = make(workspace, &workspace.target().join("book-source"), &out)?;
    println!(
        "{}: {} pages, {} links",
        out.join("index.html").display(),
        made.pages,
        made.links
    );
    Ok(ExitCode::SUCCESS)
}

/// A folder that is empty, or has a site of ours and nobody's history.
fn ensure_may_be_emptied(out: &Path) -> Result<()> {
    let mut files = match fs::read_dir(out) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        files => files.with_context(|| format!("Cannot read {}", out.display()))?,
    };
    let is_ours = out.join(MARK).exists() && !out.join(".git").exists();
    ensure!(
        is_ours || files.next().is_none(),
        "{} has files that are not those of a site made here",
        out.display()
    );
    Ok(())
}

/// Makes the site in the folder `out`, of what it lays out in `folder`; what both have had goes.
///
/// # Errors
/// When something cannot be made or written, a document is in no chapter, or a link leads nowhere.
pub fn make(workspace: &Workspace, folder: &Path, out: &Path) -> Result<site::Counted> {
    progress::step("Building farlane-pages", || {
        workspace.build(&["farlane-pages"])
    })?;
    let mdbook = cargo_tool::ensure(workspace, MDBOOK, WORDS)?;
    if folder.exists() {
        fs::remove_dir_all(folder)
            .with_context(|| format!("Cannot remove {}", folder.display()))?;
    }
    let text = folder.join("src");
    fs::create_dir_all(&text).with_context(|| format!("Cannot make {}", text.display()))?;
    let mut command = Command::new(workspace.built("farlane-pages")?);
    command.arg(folder.join("pages"));
    check_output("farlane-pages", command, TIMEOUT)?;
    let programs = reference(&folder.join("pages/reference"), &text.join("reference"))?;
    source::lay_out(workspace.root(), &programs, api::PAGES, &text)?;
    api::write(workspace, &text)?;
    let settings = folder.join("book.toml");
    fs::write(&settings, SETTINGS)
        .with_context(|| format!("Cannot write {}", settings.display()))?;
    let mut command = Command::new(mdbook);
    command
        .arg("build")
        .arg(folder)
        .arg("--dest-dir")
        .arg(out)
        // Its own words, at a level that is not the caller's.
        .env("RUST_LOG", "warn");
    progress::step("Making the site", || {
        check_output("mdbook", command, TIMEOUT)
    })?;
    let mark = out.join(MARK);
    fs::write(&mark, "").with_context(|| format!("Cannot write {}", mark.display()))?;
    let (counted, dead) = site::check(out, Path::new(api::RUSTDOC))?;
    ensure!(dead.is_empty(), "Links lead nowhere:\n{}", dead.join("\n"));
    Ok(counted)
}

/// Moves the pages of the reference to where they are read; returns their programs' names.
fn reference(made: &Path, to: &Path) -> Result<Vec<String>> {
    fs::rename(made, to).with_context(|| format!("Cannot move {}", made.display()))?;
    let entries = fs::read_dir(to).with_context(|| format!("Cannot read {}", to.display()))?;
    let mut names = Vec::new();
    for entry in entries {
        let path: PathBuf = entry?.path();
        let name = path.file_stem().context("A page has no name")?;
        names.push(name.to_string_lossy().into_owned());
    }
    names.sort();
    ensure!(!names.is_empty(), "farlane-pages made no reference");
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_site_made_here_is_emptied() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path();
        ensure_may_be_emptied(&out.join("new")).unwrap();
        ensure_may_be_emptied(out).unwrap();
        fs::write(out.join(".nojekyll"), "").unwrap();
        assert!(ensure_may_be_emptied(out).is_err());
        fs::write(out.join(MARK), "").unwrap();
        ensure_may_be_emptied(out).unwrap();
        fs::create_dir(out.join(".git")).unwrap();
        assert!(ensure_may_be_emptied(out).is_err());
    }
}
