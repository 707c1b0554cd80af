//! Tests of the repository's own rules. Reads files, changes none.

mod bounds;
mod documented;
mod layers;

use std::fs;
use std::path::{Path, PathBuf};

use walkdir::{DirEntry, WalkDir};

/// Top folders that usually have checkouts. An absolute path into one of them exists on one person's machine only.
const HOMES: [&str; 5] = ["root", "home", "Users", "work", "workspace"];
/// Homebrew's folder on Linux is the same on every machine.
const NO_HOME: &str = "linuxbrew/";

fn root() -> PathBuf {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    own.parent()
        .expect("xtask lies in the workspace")
        .to_owned()
}

fn is_ours(entry: &DirEntry) -> bool {
    let name = entry.file_name().to_string_lossy();
    // In a linked work tree, `.git` is a file.
    !(name == ".git" || name == "target" && entry.file_type().is_dir())
}

/// All text files under `folder` of the workspace with their paths from its root.
fn files(folder: &str) -> Vec<(PathBuf, String)> {
    let root = root();
    WalkDir::new(root.join(folder))
        .into_iter()
        .filter_entry(is_ours)
        .map(|entry| entry.expect("the workspace can be read"))
        .filter(|entry| entry.file_type().is_file())
        .filter_map(|entry| {
            let path = entry
                .path()
                .strip_prefix(&root)
                .expect("it lies in the root")
                .to_owned();
            Some((path, fs::read_to_string(entry.path()).ok()?))
        })
        .collect()
}

fn files_ending(folder: &str, extension: &str) -> Vec<(PathBuf, String)> {
    let mut files = files(folder);
    files.retain(|(path, _)| path.extension().is_some_and(|found| found == extension));
    assert!(
        !files.is_empty(),
        "no .{extension} file under {folder:?}: the test looks in the wrong place"
    );
    files
}

/// Fails with one line per finding.
fn none(findings: &[String], rule: &str) {
    assert!(
        findings.is_empty(),
        "{rule}:\n  {}\n",
        findings.join("\n  ")
    );
}

/// The files of the library. Tests and models may use all of it, so they are left out.
fn sources() -> Vec<(PathBuf, String)> {
    let is_of_tests = |path: &Path| {
        let path = path.with_extension("");
        path.iter().any(|part| part == "tests" || part == "model")
    };
    let mut files = files_ending("src", "rs");
    files.retain(|(path, _)| !is_of_tests(path));
    files
}

#[test]
fn the_library_imports_downwards_only() {
    let mut upwards = Vec::new();
    for (path, text) in sources() {
        upwards.extend(layers::upward_imports(&path, &text, &root()));
    }
    none(
        &upwards,
        "a module imports from its own layer and from those below it: LAYERS in layers/mod.rs",
    );
}

#[test]
fn modules_of_a_folder_import_in_one_direction() {
    let circles = layers::circles(&sources(), &root());
    none(&circles, "two modules of one folder import each other");
}

#[test]
fn the_library_never_sleeps() {
    let mut sleepers = Vec::new();
    for (path, text) in files_ending("src", "rs") {
        sleepers.extend(layers::sleeps(&path, &text));
    }
    none(&sleepers, "thread::sleep; wait for the event instead");
}

#[test]
fn every_public_item_has_an_example() {
    let lib = fs::read_to_string(root().join("src/lib.rs")).expect("the library has a lib.rs");
    let public = layers::reexports(&lib);
    let mut silent = Vec::new();
    for (path, text) in files_ending("src", "rs") {
        let module = layers::module_of(&path);
        let own = public
            .iter()
            .filter(|(_, from)| Some(*from) == module.as_ref());
        let own = own.map(|(name, _)| name.clone()).collect();
        for name in documented::never_shown(&text, &own) {
            silent.push(format!("{}: {name}", path.display()));
        }
        for name in documented::never_shown_in_macros(&text) {
            silent.push(format!("{}: {name} of a macro", path.display()));
        }
    }
    none(
        &silent,
        "no example in its docs, nor (of a function) in those of its type",
    );
}

#[test]
fn every_guide_page_is_linked() {
    let text = |path| fs::read_to_string(root().join(path)).expect("it is there");
    let (readme, guide) = (text("README.md"), text("src/guide.rs"));
    let mut forgotten = Vec::new();
    for (path, _) in files_ending("docs", "md") {
        // Records of runs, and the page of bounds, are not pages of the guide.
        if path.starts_with("docs/performance") || path == Path::new("docs/bounds.md") {
            continue;
        }
        let page = path.display().to_string();
        if !readme.contains(&format!("]: {page}")) {
            forgotten.push(format!("{page}: not in the README's table"));
        }
        if !guide.contains(&format!("\"../{page}\"")) {
            forgotten.push(format!("{page}: not in src/guide.rs"));
        }
    }
    none(&forgotten, "a page without a link to it");
}

#[test]
fn every_setting_is_on_the_page_of_settings() {
    let text = |path| fs::read_to_string(root().join(path)).expect("it is there");
    let (page, builder) = (text("docs/settings.md"), text("src/client/builder.rs"));
    let settings = builder.lines().filter_map(|line| {
        let (name, parameters) = line.trim().strip_prefix("pub fn ")?.split_once('(')?;
        let name = name.split('<').next()?;
        parameters.starts_with("mut self, ").then_some(name)
    });
    let settings: Vec<_> = settings.collect();
    assert!(settings.len() >= 15, "{settings:?}");
    let is_missing = |name: &&str| !page.contains(&format!("| `{name}`:"));
    let missing: Vec<_> = settings.into_iter().filter(is_missing).collect();
    assert_eq!(missing, [""; 0], "not in docs/settings.md");
}

#[test]
fn the_guide_lists_every_error_and_loss() {
    let text = |path| fs::read_to_string(root().join(path)).expect("it is there");
    let page = text("docs/failures.md");
    for (file, name) in [
        ("src/report/error.rs", "ErrorKind"),
        ("src/report/loss.rs", "LossReason"),
    ] {
        let listed = documented::first_column(&page, name);
        assert_eq!(listed, documented::variants(&text(file), name), "{name}");
    }
}

#[test]
fn every_script_has_a_complete_header() {
    let mut silent = Vec::new();
    for (path, text) in files_ending("lua", "lua") {
        let header: Vec<_> = text
            .lines()
            .take_while(|line| line.starts_with("--"))
            .collect();
        for word in ["Purpose", "KEYS", "ARGV", "Returns"] {
            let says = |line: &&str| line.trim_start_matches(['-', ' ']).starts_with(word);
            if !header.iter().any(says) {
                silent.push(format!(
                    "{}: no line `-- {word}` at its top",
                    path.display()
                ));
            }
        }
    }
    none(&silent, "a script's header is its contract");
}

#[test]
fn every_example_is_listed_and_run_by_a_test() {
    let root = root();
    let text = |path| fs::read_to_string(root.join(path)).expect("it is there");
    let (readme, tests) = (text("examples/README.md"), text("tests/it/examples.rs"));
    let mut forgotten = Vec::new();
    for (path, _) in files_ending("examples", "rs") {
        let name = path.file_stem().expect("it is a file").to_string_lossy();
        if !readme.contains(&format!("[{name}]({name}.rs)")) {
            forgotten.push(format!("{name}: not in examples/README.md"));
        }
        if !tests.contains(&format!("run(\"{name}\"")) {
            forgotten.push(format!("{name}: not run by tests/it/examples.rs"));
        }
    }
    none(&forgotten, "an example that is not listed, or not tested");
}

#[test]
fn no_file_names_a_path_of_one_machine() {
    let mut absolute = Vec::new();
    for (path, text) in files("") {
        for (number, line) in text.lines().enumerate() {
            if names_a_home(line) {
                absolute.push(format!(
                    "{}:{}: {}",
                    path.display(),
                    number + 1,
                    line.trim()
                ));
            }
        }
    }
    none(
        &absolute,
        "an absolute path that exists on one machine only",
    );
}

#[test]
fn cargo_xtask_uses_the_locked_dependencies() {
    let settings = files(".cargo");
    let aliases = settings.iter().flat_map(|(_, text)| text.lines());
    let mut aliases = aliases.filter(|line| line.starts_with("xtask ="));
    let alias = aliases.next().expect("there is an alias xtask");
    assert!(alias.contains(" --locked "), "{alias}");
}

/// Whether a line has an absolute path that begins with one of the `HOMES`. A path or URL that only contains such a
/// name does not count.
fn names_a_home(line: &str) -> bool {
    HOMES.iter().any(|home| {
        line.match_indices(&format!("/{home}/")).any(|(at, _)| {
            let (before, path) = line.split_at(at);
            let before = before.chars().next_back();
            let inside = &path[home.len() + 2..];
            !inside.starts_with(NO_HOME)
                && !before.is_some_and(|c| c.is_alphanumeric() || "._-~/}*".contains(c))
        })
    })
}

#[test]
fn a_home_is_found_at_the_start_of_a_path_only() {
    let home = HOMES[1];
    assert!(names_a_home(&format!("open(\"/{home}/someone\")")));
    assert!(names_a_home(&format!("/{home}/someone")));
    assert!(!names_a_home(&format!("https://example.org/{home}/page")));
    assert!(!names_a_home(&format!("src/{home}/mod.rs")));
    assert!(!names_a_home(&format!("/usr/bin:/{home}/linuxbrew/bin")));
}

#[test]
fn every_test_that_a_page_names_exists() {
    let mut sources = files_ending("tests", "rs");
    sources.extend(files_ending("src", "rs"));
    sources.extend(files_ending("crates/models/src", "rs"));
    sources.extend(files_ending("crates/cli", "rs"));
    for (page, fewest) in [
        ("docs/conformance.md", 50),
        ("docs/quorum.md", 15),
        ("docs/security.md", 15),
    ] {
        let text = fs::read_to_string(root().join(page)).expect("it is there");
        let rows = text.lines().filter(|line| line.starts_with('|'));
        let quoted = rows.flat_map(|line| line.split('`').skip(1).step_by(2));
        let names: Vec<&str> = quoted.filter(|word| is_path_of_a_test(word)).collect();
        assert!(names.len() >= fewest, "{page} is parsed wrongly: {names:?}");
        let missing = names.into_iter().filter(|name| !is_a_test(name, &sources));
        let missing: Vec<String> = missing.map(str::to_owned).collect();
        none(
            &missing,
            &format!("{page} names a test that does not exist"),
        );
    }
}

#[test]
fn the_page_on_conformance_names_every_behaviour() {
    let read = |path: &str| fs::read_to_string(root().join(path)).expect("it is there");
    let (page, lists) = (
        read("docs/conformance.md"),
        read("tests/it/conformance/mod.rs"),
    );
    // `<subject>:`, then its behaviours, one a line; the last one has a semicolon.
    let lists = lists.split("shown! { $backend;").skip(1);
    let lines = lists.flat_map(|list| list.lines().skip(1).take_while(|line| line.trim() != "}"));
    let (mut subject, mut behaviours) = ("", Vec::new());
    for line in lines.map(str::trim) {
        match line.strip_suffix(':') {
            Some(next) => subject = next,
            None => {
                let behaviour = line.trim_end_matches(';');
                behaviours.push(format!("conformance::{subject}::{behaviour}"));
            }
        }
    }
    assert!(behaviours.len() >= 60, "read wrongly: {behaviours:?}");
    behaviours.retain(|behaviour| !page.contains(&format!("`{behaviour}`")));
    none(&behaviours, "docs/conformance.md does not name a behaviour");
}

#[test]
fn the_page_of_bounds_agrees_with_the_sources() {
    let page = fs::read_to_string(root().join("docs/bounds.md")).expect("it is there");
    let mut sources = files_ending("src", "rs");
    sources.extend(files_ending("lua", "lua"));
    let rule = "docs/bounds.md quotes a constant or a script wrongly";
    none(&bounds::wrong_quotes(&page, &sources), rule);
    let rule = "a bound that docs/bounds.md does not name";
    none(&bounds::forgotten(&page, &sources), rule);
}

#[test]
fn every_table_with_tests_names_tests_that_exist() {
    let mut sources = files_ending("tests", "rs");
    sources.extend(files_ending("src", "rs"));
    for (page, fewest) in [("ARCHITECTURE.md", 40), ("docs/bounds.md", 60)] {
        let text = fs::read_to_string(root().join(page)).expect("it is there");
        let names = documented::last_column(&text, "tests");
        assert!(names.len() >= fewest, "{page} is parsed wrongly: {names:?}");
        let exists = |name: &String| is_a_test(name, &sources) || has_tests(name, &sources);
        let missing: Vec<_> = names.into_iter().filter(|name| !exists(name)).collect();
        none(
            &missing,
            &format!("{page} names no test and no module of tests"),
        );
    }
}

/// Whether there is a module or a program of tests with this path.
fn has_tests(module: &str, sources: &[(PathBuf, String)]) -> bool {
    let folders = ["tests/it", "tests", "src"]
        .map(|folder| Path::new(folder).join(module.replace("::", "/")));
    let mut files = folders.map(|path| [path.with_extension("rs"), path.join("mod.rs")]);
    if files
        .iter_mut()
        .any(|files| sources.iter().any(|(path, _)| files.contains(path)))
    {
        return true;
    }
    let Some(parent) = module.strip_suffix("::tests") else {
        return false;
    };
    let path = Path::new("src").join(parent.replace("::", "/"));
    let files = [path.with_extension("rs"), path.join("mod.rs")];
    let has_tests =
        |(path, text): &(PathBuf, String)| files.contains(path) && text.contains("\nmod tests {");
    sources.iter().any(has_tests)
}

fn is_path_of_a_test(word: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_' || c == ':';
    word.contains("::") && word.chars().all(is_plain)
}

/// Whether there is a test of this path: an integration test, a test in a program of its own, a unit test, or a test of
/// a model.
fn is_a_test(name: &str, sources: &[(PathBuf, String)]) -> bool {
    let Some((module, test)) = name.rsplit_once("::") else {
        return false;
    };
    let of = |folder: &str, module: &str| {
        let file = Path::new(folder).join(module.replace("::", "/"));
        [file.with_extension("rs"), file.join("mod.rs")]
    };
    if let Some(module) = module.strip_prefix("models::") {
        let files = of("crates/models/src", module);
        let declared = format!("\nfn {test}(");
        return sources
            .iter()
            .any(|(path, text)| files.contains(path) && text.contains(&declared));
    }
    // The last folder has the tests of the program `leasehold`.
    let own_file =
        ["tests/it", "tests", "src", "crates/cli/tests/cli"].map(|folder| of(folder, module));
    let within = module.strip_suffix("::tests");
    let within = within.map_or(Vec::new(), |module| {
        [of("src", module), of("crates/cli/src", module)].concat()
    });
    let declared = [format!("\nfn {test}("), format!("\npub fn {test}(")];
    sources.iter().any(|(path, text)| {
        let declares = |name: &String| text.contains(name);
        own_file.as_flattened().contains(path) && declared.iter().any(declares)
            || within.contains(path) && declares(&format!("\n    fn {test}("))
    })
}

#[test]
fn a_test_is_found_in_each_place_for_tests() {
    let sources = [
        ("tests/it/a/mod.rs", "\nfn one() {}"),
        ("src/b/tests.rs", "\nfn two() {}"),
        ("src/b.rs", "\n    fn three() {}"),
    ];
    let sources = sources.map(|(path, text)| (PathBuf::from(path), text.to_owned()));
    for name in ["a::one", "b::tests::two", "b::tests::three"] {
        assert!(
            is_path_of_a_test(name) && is_a_test(name, &sources),
            "{name}"
        );
    }
    for name in ["a::two", "b::tests::one", "b::three", "c::one"] {
        assert!(!is_a_test(name, &sources), "{name}");
    }
    assert!(!is_path_of_a_test("%R~<prefix>*") && !is_path_of_a_test("ErrorKind::Io"));
}
