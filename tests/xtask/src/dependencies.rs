//! What the programs are built of: the packages of other projects, of which packages of ours carry
//! a list (CycloneDX 1.5).

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::{Context as _, Result};
use cyclonedx_bom::external_models::spdx::SpdxExpression;
use cyclonedx_bom::models::bom::Bom;
use cyclonedx_bom::models::component::{Classification, Component, Components};
use cyclonedx_bom::models::dependency::{Dependencies as Edges, Dependency};
use cyclonedx_bom::models::license::{LicenseChoice, Licenses};
use cyclonedx_bom::prelude::Purl;
use farlane_kit::process::check_output;
use farlane_kit::workspace::Workspace;
use serde::Deserialize;

const TIMEOUT: Duration = Duration::from_secs(300);

/// `cargo metadata`, of which this is what is read.
#[derive(Debug, Deserialize)]
struct Metadata {
    packages: Vec<Package>,
    resolve: Resolve,
}

/// A package, of this project or of another one.
#[derive(Debug, Deserialize)]
struct Package {
    id: String,
    name: String,
    version: String,
    license: Option<String>,
    /// Of which registry; none of this project.
    source: Option<String>,
}

impl Package {
    /// What the list calls it. Its id says where it is on this machine.
    fn reference(&self) -> String {
        format!("{}@{}", self.name, self.version)
    }
}

#[derive(Debug, Deserialize)]
struct Resolve {
    nodes: Vec<Node>,
}

/// What a package is built of.
#[derive(Debug, Deserialize)]
struct Node {
    id: String,
    deps: Vec<Edge>,
}

#[derive(Debug, Deserialize)]
struct Edge {
    pkg: String,
    dep_kinds: Vec<EdgeKind>,
}

/// Why a package is needed; nothing where it becomes a part of the other one.
#[derive(Debug, Deserialize)]
struct EdgeKind {
    kind: Option<String>,
}

/// Everything that this project is built of.
#[derive(Debug)]
pub struct Dependencies {
    packages: BTreeMap<String, Package>,
    /// What becomes a part of each.
    parts: BTreeMap<String, Vec<String>>,
}

impl Dependencies {
    /// Asks cargo, of the versions of `Cargo.lock`.
    ///
    /// # Errors
    /// What it says.
    pub fn of(workspace: &Workspace) -> Result<Self> {
        let platform = "--filter-platform=x86_64-unknown-linux-gnu";
        let words = ["metadata", "--locked", "--format-version=1", platform];
        let text = check_output("cargo metadata", workspace.cargo(&words), TIMEOUT)?;
        let metadata: Metadata =
            serde_json::from_str(&text).context("cargo metadata says what is not known")?;
        let is_part = |edge: &Edge| edge.dep_kinds.iter().any(|kind| kind.kind.is_none());
        let parts = metadata.resolve.nodes.into_iter().map(|node| {
            let parts = node.deps.into_iter().filter(is_part);
            (node.id, parts.map(|edge| edge.pkg).collect())
        });
        let packages = metadata.packages.into_iter();
        Ok(Self {
            packages: packages.map(|one| (one.id.clone(), one)).collect(),
            parts: parts.collect(),
        })
    }

    /// The list of what some packages of this project, by their names, are made of.
    ///
    /// # Errors
    /// There is no such package, or it cannot be written.
    pub fn list(&self, names: &[&str]) -> Result<Vec<u8>> {
        let mut todo = Vec::new();
        for name in names {
            let found = self.packages.values().find(|one| one.name == *name);
            let found = found.with_context(|| format!("There is no package {name}"))?;
            todo.push(found.id.as_str());
        }
        let mut listed = BTreeSet::new();
        while let Some(id) = todo.pop() {
            if listed.insert(id) {
                todo.extend(self.parts_of(id).iter().map(String::as_str));
            }
        }
        let components: Result<Vec<_>> = listed.iter().map(|id| self.component(id)).collect();
        let edges = listed.iter().map(|id| {
            let parts = self.parts_of(id).iter();
            let parts: Result<_> = parts
                .map(|part| Ok(self.package(part)?.reference()))
                .collect();
            anyhow::Ok(Dependency {
                dependency_ref: self.package(id)?.reference(),
                dependencies: parts?,
            })
        });
        let edges: Result<Vec<_>> = edges.collect();
        let bom = Bom {
            // The same for the same sources.
            serial_number: None,
            components: Some(Components(components?)),
            dependencies: Some(Edges(edges?)),
            ..Bom::default()
        };
        let mut out = Vec::new();
        bom.output_as_json_v1_5(&mut out)?;
        Ok(out)
    }

    fn parts_of(&self, id: &str) -> &[String] {
        self.parts.get(id).map_or(&[], Vec::as_slice)
    }

    fn package(&self, id: &str) -> Result<&Package> {
        let package = self.packages.get(id);
        package.with_context(|| format!("cargo does not say what {id} is"))
    }

    fn component(&self, id: &str) -> Result<Component> {
        let package = self.package(id)?;
        let Package { name, version, .. } = package;
        let mut component = Component::new(
            Classification::Library,
            name,
            version,
            Some(package.reference()),
        );
        let license = package.license.as_deref().map(spdx_expression);
        let license = license.map(|text| LicenseChoice::Expression(SpdxExpression::new(&text)));
        component.licenses = license.map(|license| Licenses(vec![license]));
        if package.source.is_some() {
            component.purl = Some(Purl::new("cargo", name, version)?);
        }
        Ok(component)
    }
}

/// A licence as SPDX writes it: older manifests have a slash for "or".
fn spdx_expression(license: &str) -> String {
    license
        .split('/')
        .map(str::trim)
        .collect::<Vec<_>>()
        .join(" OR ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::package::CRATES;
    use serde_json::Value;

    fn ours() -> (Dependencies, toml::Value) {
        let workspace = Workspace::find().unwrap();
        let text = std::fs::read_to_string(workspace.root().join("deny.toml")).unwrap();
        let policy = text.parse::<toml::Table>().unwrap();
        (Dependencies::of(&workspace).unwrap(), policy.into())
    }

    #[test]
    fn licences_and_sources_are_those_that_are_allowed() {
        let (dependencies, policy) = ours();
        let allowed = policy["licenses"]["allow"].as_array().unwrap();
        let allowed: Vec<&str> = allowed.iter().map(|one| one.as_str().unwrap()).collect();
        for Package {
            id,
            license,
            source,
            ..
        } in dependencies.packages.values()
        {
            let license = license
                .as_ref()
                .unwrap_or_else(|| panic!("{id} has no licence"));
            let expression = spdx::Expression::parse(&spdx_expression(license)).unwrap();
            let is_allowed = expression.evaluate(|needed| {
                let name = needed.license.id().map(|id| id.name);
                needed.addition.is_none() && name.is_some_and(|name| allowed.contains(&name))
            });
            assert!(is_allowed, "{id}: {license}");
            let source = source.as_deref().unwrap_or("registry+");
            assert!(source.starts_with("registry+"), "{id} is from {source}");
        }
    }

    #[test]
    fn the_list_has_what_programs_are_made_of_and_no_more() {
        let (dependencies, _) = ours();
        let text = String::from_utf8(dependencies.list(CRATES).unwrap()).unwrap();
        let root = Workspace::find().unwrap().root().display().to_string();
        assert!(
            !text.contains(&root),
            "It says where this checkout is: {text}"
        );
        let list: Value = serde_json::from_str(&text).unwrap();
        let components = list["components"].as_array().unwrap();
        let has = |name: &str| components.iter().any(|one| one["name"] == name);
        assert!(has("farlane-rdma") && has("vhost") && has("rustls"));
        // Of tests alone, and what runs while others are compiled.
        assert!(!has("proptest") && !has("xtask") && !has("cc"));
        let one = components
            .iter()
            .find(|one| one["name"] == "vhost")
            .unwrap();
        assert!(
            one["purl"]
                .as_str()
                .unwrap()
                .starts_with("pkg:cargo/vhost@")
        );
        assert_eq!(
            one["licenses"][0]["expression"],
            "Apache-2.0 OR BSD-3-Clause"
        );
    }
}
