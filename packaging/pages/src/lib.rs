//! Man pages, pages for the site, and shell completions of Farlane's programs, made from their
//! command lines.
//!
//! * [`programs`]: which programs there are;
//! * [`man`]: a man page;
//! * [`mod@reference`]: a page for the site;
//! * [`write_all`]: all of it, in a folder.

pub mod man;
pub mod programs;
pub mod reference;

use anyhow::Context as _;
use clap_complete::{Shell, generate_to};
use std::fs;
use std::path::Path;

/// Shells, and the folders in which their completions go.
const SHELLS: [(Shell, &str); 3] = [
    (Shell::Bash, "bash"),
    (Shell::Zsh, "zsh"),
    (Shell::Fish, "fish"),
];

/// Writes `man/*.1`, `reference/*.md`, and completions in `bash`, `zsh` and `fish`, in a folder.
///
/// # Errors
/// When something cannot be written.
pub fn write_all(out: &Path) -> anyhow::Result<()> {
    let folder = |name: &str| {
        let folder = out.join(name);
        fs::create_dir_all(&folder).with_context(|| format!("Cannot make {}", folder.display()))?;
        anyhow::Ok(folder)
    };
    let pages = folder("man")?;
    let reference = folder("reference")?;
    for program in programs::all() {
        for (name, text) in man::pages(&program)? {
            let path = pages.join(format!("{name}.1"));
            fs::write(&path, text).with_context(|| format!("Cannot write {}", path.display()))?;
        }
        let path = reference.join(format!("{}.md", program.command.get_name()));
        fs::write(&path, reference::page(&program))
            .with_context(|| format!("Cannot write {}", path.display()))?;
        let mut command = program.command;
        let name = command.get_name().to_owned();
        for (shell, into) in SHELLS {
            let path = folder(into)?;
            generate_to(shell, &mut command, &name, &path)
                .with_context(|| format!("Cannot write completions in {}", path.display()))?;
            if shell == Shell::Bash {
                // bash-completion looks for the name of the program.
                let made = path.join(format!("{name}.bash"));
                fs::rename(&made, path.join(&name))
                    .with_context(|| format!("Cannot rename {}", made.display()))?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_program_has_a_page_and_completions() {
        let out = tempfile::tempdir().unwrap();
        write_all(out.path()).unwrap();
        for program in programs::all() {
            let name = program.command.get_name();
            let page = fs::read_to_string(out.path().join(format!("man/{name}.1"))).unwrap();
            for section in ["NAME", "SYNOPSIS", "OPTIONS", "FILES", "\"SEE ALSO\""] {
                let heading = format!(".SH {section}\n");
                assert!(page.contains(&heading), "{name}: {section}\n{page}");
            }
            for completion in [
                format!("bash/{name}"),
                format!("zsh/_{name}"),
                format!("fish/{name}.fish"),
                format!("reference/{name}.md"),
            ] {
                assert!(out.path().join(&completion).exists(), "{completion}");
            }
        }
        let page = |name: &str| fs::read_to_string(out.path().join(format!("man/{name}.1")));
        assert!(page("farlane-lend-revoke").is_ok());
        assert!(page("farlane-status").unwrap().contains("json"));
        // Of `farlane lend` there is the program's.
        assert!(page("farlane-lend").unwrap().contains("listen"));
        assert!(page("farlane").unwrap().contains("lend(1)"));
    }
}
