//! `cargo xtask doc-links`: looks for dead links in the API docs that `cargo doc` has built. Does not check
//! links to the web.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fs;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context as _, ensure};
use leasehold_tools::cargo::target_folder;

pub fn run() -> anyhow::Result<()> {
    let docs = target_folder()?.join("doc");
    let mut pages = HashMap::new();
    read_pages(&docs.join("leasehold"), &mut pages)
        .context("there are no docs: run `cargo doc` first")?;
    let dead = dead_links(&pages);
    let dead: Vec<String> = dead.into_iter().collect();
    ensure!(dead.is_empty(), "dead links:\n  {}", dead.join("\n  "));
    println!("{} pages, no dead links", pages.len());
    Ok(())
}

/// The pages below `folder` by their paths.
fn read_pages(folder: &Path, pages: &mut HashMap<PathBuf, String>) -> anyhow::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            read_pages(&path, pages)?;
        } else if path.extension().is_some_and(|found| found == "html") {
            pages.insert(path.clone(), fs::read_to_string(&path)?);
        }
    }
    Ok(())
}

/// Each relative link that leads to no file, or to an anchor that its page lacks.
fn dead_links(pages: &HashMap<PathBuf, String>) -> BTreeSet<String> {
    let places: HashMap<&Path, HashSet<&str>> = pages
        .iter()
        .map(|(path, text)| (path.as_path(), attributes(text, " id=\"").collect()))
        .collect();
    let mut dead = BTreeSet::new();
    for (path, text) in pages {
        for link in attributes(text, " href=\"") {
            let (file, place) = link.split_once('#').unwrap_or((link, ""));
            if file.contains("://") || file.starts_with("mailto:") {
                continue;
            }
            let target = match file {
                "" => path.clone(),
                file => joined(path.parent().unwrap_or(path), file),
            };
            // The anchors of sources and of other crates' pages are not checked.
            let has_place = places
                .get(target.as_path())
                .is_none_or(|ids| place.is_empty() || ids.contains(place));
            if !target.exists() && !pages.contains_key(&target) || !has_place {
                dead.insert(format!("{}: {link}", path.display()));
            }
        }
    }
    dead
}

/// The values of an attribute, whose text begins with `name`.
fn attributes<'a>(text: &'a str, name: &'a str) -> impl Iterator<Item = &'a str> {
    let parts = text.split(name).skip(1);
    parts.filter_map(|rest| rest.split('"').next())
}

/// `link` as seen from `folder`, without `..`.
fn joined(folder: &Path, link: &str) -> PathBuf {
    let mut path = folder.to_owned();
    for part in Path::new(link).components() {
        match part {
            Component::ParentDir => {
                path.pop();
            }
            part => path.push(part),
        }
    }
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_to_missing_pages_and_places_are_found() {
        let one = "<a href=\"two.html#here\"> <a href=\"#top\"> <a href=\"https://example.org/x\"> <p id=\"top\">";
        let two = "<p id=\"here\"> <a href=\"../docs/one.html\"> <a href=\"#gone\"> <a href=\"three.html\">";
        let pages = [("/docs/one.html", one), ("/docs/two.html", two)];
        let pages = pages.map(|(path, text)| (PathBuf::from(path), text.to_owned()));
        let dead: Vec<String> = dead_links(&HashMap::from(pages)).into_iter().collect();
        assert_eq!(
            dead,
            ["/docs/two.html: #gone", "/docs/two.html: three.html"]
        );
    }
}
