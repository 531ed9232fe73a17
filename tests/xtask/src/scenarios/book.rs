//! The documents as a site: every link of it leads somewhere.

use anyhow::{Result, ensure};
use farlane_kit::report::Report;

use crate::book;
use crate::run::Run;

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let workspace = run.context.workspace();
    let made = book::make(workspace, &run.path("source"), &run.path("site"))?;
    ensure!(made.links > made.pages, "The site has no links: {made:?}");
    report.add("site", "pages", made.pages.to_string());
    report.add("site", "links within", made.links.to_string());
    Ok(())
}
