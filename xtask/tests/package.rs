//! Checks the package that `cargo package` makes: its files, its links, and its dependencies.

use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> PathBuf {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    own.parent()
        .expect("xtask lies in the workspace")
        .to_owned()
}

fn cargo(arguments: &[&str]) -> String {
    let program = env::var_os("CARGO").expect("cargo runs the tests");
    let output = Command::new(program)
        .args(arguments)
        .current_dir(root())
        .output()
        .expect("it runs");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {errors}");
    String::from_utf8(output.stdout).expect("it is text")
}

fn packaged() -> BTreeSet<String> {
    let listed = cargo(&[
        "package",
        "--locked",
        "--list",
        "--allow-dirty",
        "--package",
        "leasehold",
    ]);
    listed.lines().map(|line| line.replace('\\', "/")).collect()
}

fn text(path: &str) -> String {
    fs::read_to_string(root().join(path)).expect("it is there")
}

/// The names of the files in `folder` that end with `end`.
fn names(folder: &str, end: &str) -> Vec<String> {
    let entries = fs::read_dir(root().join(folder)).expect("it is there");
    let names = entries.map(|entry| entry.expect("it can be read").file_name());
    let names = names.map(|name| name.to_string_lossy().into_owned());
    names.filter(|name| name.ends_with(end)).collect()
}

#[test]
fn the_package_contains_what_users_need() {
    let mut expected: BTreeSet<String> = [
        // Made by cargo.
        ".cargo_vcs_info.json",
        "Cargo.lock",
        "Cargo.toml",
        "Cargo.toml.orig",
        "CHANGELOG.md",
        "LICENSE-APACHE",
        "LICENSE-MIT",
        "README.md",
        "SECURITY.md",
        "lua/parts.rs",
    ]
    .map(str::to_owned)
    .into();
    for (folder, end) in [
        ("docs", ".md"),
        ("docs/pictures", ".svg"),
        ("docs/pictures", ".txt"),
        ("examples", ".md"),
        ("examples", ".rs"),
        ("lua", ".lua"),
        ("lua", ".md"),
    ] {
        expected.extend(
            names(folder, end)
                .iter()
                .map(|name| format!("{folder}/{name}")),
        );
    }
    let (sources, others): (BTreeSet<_>, _) = packaged()
        .into_iter()
        .partition(|path| path.starts_with("src/") && path.ends_with(".rs"));
    assert_eq!(others, expected);
    for module in ["src/lib.rs", "src/guide.rs", "src/wire/mod.rs"] {
        assert!(sources.contains(module), "{module}");
    }
}

#[test]
fn packaged_code_needs_nothing_unpublished() {
    let files = packaged();
    let sources = files.iter().filter(|path| path.ends_with(".rs"));
    for path in sources {
        let text = text(path);
        // The package has no doc tests, so comments do not count.
        let code = text
            .lines()
            .filter(|line| !line.trim_start().starts_with("//"));
        let unpublished = ["leasehold_testbed", "leasehold_load"];
        let needs: Vec<_> = code
            .filter(|line| unpublished.iter().any(|name| line.contains(name)))
            .collect();
        assert!(needs.is_empty(), "{path}: {needs:?}");
    }
}

#[test]
fn links_of_packaged_pages_lead_to_packaged_files() {
    let files = packaged();
    let pages = files.iter().filter(|path| path.ends_with(".md"));
    let mut links = 0;
    for page in pages {
        for link in relative_links(&text(page)) {
            let target = target_of(page, &link);
            assert!(files.contains(&target), "{page}: {link}");
            links += 1;
        }
    }
    assert!(links > 20, "links are read wrongly: {links}");
}

#[test]
fn links_of_other_pages_lead_to_files() {
    for page in names("", ".md") {
        for link in relative_links(&text(&page)) {
            assert!(
                root().join(target_of(&page, &link)).exists(),
                "{page}: {link}"
            );
        }
    }
}

/// The targets of a page's links that are no URLs, without their anchors.
fn relative_links(page: &str) -> Vec<String> {
    let (mut links, mut in_code) = (Vec::new(), false);
    for line in page.lines() {
        if line.starts_with("```") {
            in_code = !in_code;
        }
        if in_code {
            continue;
        }
        let inline = line.split("](").skip(1);
        let inline = inline.filter_map(|rest| rest.split([')', ' ']).next());
        let defined = line
            .strip_prefix('[')
            .and_then(|rest| rest.split_once("]: "));
        links.extend(
            inline
                .chain(defined.map(|(_, link)| link))
                .map(str::to_owned),
        );
    }
    links.retain(|link| !link.contains("://"));
    links
}

/// The file that `link` on `page` leads to.
fn target_of(page: &str, link: &str) -> String {
    let link = link.split('#').next().unwrap_or_default();
    if link.is_empty() {
        return page.to_owned();
    }
    let mut path = PathBuf::from(page);
    path.pop();
    for part in link.split('/') {
        match part {
            ".." => assert!(path.pop(), "{page}: {link} leads out of the package"),
            part => path.push(part),
        }
    }
    path.to_string_lossy().into_owned()
}

#[test]
fn links_are_found_in_text_and_not_in_code() {
    let page =
        "[a](b.md#c), [d](../e.md) and [f](https://example.org)\n```\n[g](h)\n```\n[i]: j.md\n";
    assert_eq!(relative_links(page), ["b.md#c", "../e.md", "j.md"]);
    assert_eq!(target_of("docs/x.md", "b.md#c"), "docs/b.md");
    assert_eq!(target_of("docs/x.md", "../e.md"), "e.md");
    assert_eq!(target_of("docs/x.md", "#here"), "docs/x.md");
}

#[test]
fn the_library_has_no_dependency_in_two_versions() {
    let twice = cargo(&[
        "tree",
        "--locked",
        "--package",
        "leasehold",
        "--edges",
        "normal",
        "--features",
        "tracing,metrics",
        "--duplicates",
        "--depth",
        "0",
    ]);
    assert_eq!(twice.trim(), "");
}

#[test]
fn no_dependency_needs_a_newer_rust() {
    let newest = version(env!("CARGO_PKG_RUST_VERSION"));
    let metadata = cargo(&[
        "metadata",
        "--locked",
        "--format-version",
        "1",
        "--filter-platform",
        HOST,
    ]);
    let metadata: serde_json::Value = serde_json::from_str(&metadata).expect("it is JSON");
    let packages = metadata["packages"].as_array().expect("there are packages");
    let needs = packages.iter().filter_map(|package| {
        let rust = package["rust_version"].as_str()?;
        (version(rust) > newest).then(|| format!("{} needs Rust {rust}", package["name"]))
    });
    assert_eq!(needs.collect::<Vec<_>>(), [""; 0]);
    assert!(packages.len() > 50, "the packages are read wrongly");
}

#[test]
fn the_readme_names_the_oldest_rust() {
    let named = format!("Rust {} or newer", env!("CARGO_PKG_RUST_VERSION"));
    assert!(text("README.md").contains(&named), "{named}");
}

/// The dependencies of other platforms may be missing, and cannot be downloaded here.
const HOST: &str = if cfg!(target_os = "macos") {
    "aarch64-apple-darwin"
} else {
    "x86_64-unknown-linux-gnu"
};

fn version(text: &str) -> Vec<u32> {
    let parts = text
        .split('.')
        .map(|part| part.parse().expect("it is a number"));
    let mut parts: Vec<u32> = parts.collect();
    parts.resize(3, 0);
    parts
}
