//! Reads the library's source as syntax: which module imports which, and which code sleeps. Test code is
//! exempt.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use proc_macro2::Span;
use syn::visit::{self, Visit};
use syn::{Attribute, Item, Meta, UseTree, Visibility};

/// The layers, from the bottom up: modules of the library, each with the modules in its folder. A module imports from
/// its own layer and from those below it. The longest name that matches counts, so a file can have a layer of its own.
const LAYERS: [&[&str]; 19] = [
    &["util"],
    &["report"],
    &["process"],
    &["config"],
    &["command"],
    &["store"],
    &["memory"],
    &["wire::net"],
    &["wire::scripts"],
    &["wire::connect"],
    &["wire::sentinel"],
    &["wire::endpoint"],
    &["wire"],
    &["cluster"],
    &["quorum"],
    &["lease"],
    &["watchdog"],
    &["acquire"],
    &["locks", "client", "guide", "internals"],
];

/// Modules of one folder that may import each other. A client makes locks, and a lock keeps its client.
const CIRCLES: [(&str, &str); 1] = [("client", "locks")];

fn contains(module: &str, path: &str) -> bool {
    let rest = path.strip_prefix(module);
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
}

/// The index of the layer that a path belongs to.
fn layer(path: &str) -> Option<usize> {
    let layers = LAYERS.iter().enumerate();
    let modules = layers.flat_map(|(index, modules)| modules.iter().map(move |name| (index, name)));
    let matching = modules.filter(|(_, name)| contains(name, path));
    let longest = matching.max_by_key(|(_, name)| name.len());
    longest.map(|(index, _)| index)
}

/// The module of the library that a file contains: `src/lease/held.rs` is `lease::held`.
pub fn module_of(path: &Path) -> Option<String> {
    let path = path.strip_prefix("src").ok()?.with_extension("");
    let names = path.iter().map(|name| name.to_string_lossy().into_owned());
    let mut names: Vec<_> = names.collect();
    if names.last().is_some_and(|name| name == "mod") {
        names.pop();
    }
    Some(names.join("::"))
}

/// Every mention of a higher layer in the file at `path`, one line each.
pub fn upward_imports(path: &Path, text: &str, root: &Path) -> Vec<String> {
    let module = module_of(path).expect("it lies in src");
    if module == "lib" {
        return Vec::new();
    }
    let Some(own) = layer(&module) else {
        return vec![format!("{}: in no layer; add it to LAYERS", path.display())];
    };
    let lib = fs::read_to_string(root.join("src/lib.rs")).expect("the library has a lib.rs");
    let reexports = reexports(&lib);
    let mut found = Vec::new();
    for (name, line) in mentions(text).of_crate {
        let target = reexports.get(&name).unwrap_or(&name);
        let place = format!("{}:{line}: {module} mentions crate::{name}", path.display());
        match layer(target) {
            Some(other) if other > own => found.push(place),
            Some(_) => {}
            None => found.push(format!("{place}, which is in no layer; add it to LAYERS")),
        }
    }
    found
}

/// Circles of imports between the modules of one folder, for all folders of the library: one line each. `texts` has the
/// path and the text of each file outside tests. A folder's own `mod.rs` and its modules may import each other.
pub fn circles(texts: &[(PathBuf, String)], root: &Path) -> Vec<String> {
    let lib = fs::read_to_string(root.join("src/lib.rs")).expect("the library has a lib.rs");
    let reexports = reexports(&lib);
    let names = texts.iter().filter_map(|(path, _)| module_of(path));
    let modules: BTreeSet<String> = names.collect();
    // For each folder: which of its modules imports which, and in which file.
    let mut folders: BTreeMap<String, BTreeMap<String, BTreeMap<String, String>>> = BTreeMap::new();
    for (path, text) in texts {
        let module = module_of(path).expect("it lies in src");
        if module == "lib" {
            continue;
        }
        for (name, line) in mentions(text).of_crate {
            let mentioned = reexports.get(&name).unwrap_or(&name);
            let target = longest_of(&modules, mentioned);
            let Some((folder, from, to)) = target.and_then(|target| siblings(&module, target))
            else {
                continue;
            };
            if CIRCLES.contains(&(&from, &to)) || CIRCLES.contains(&(&to, &from)) {
                continue;
            }
            let imports = folders.entry(folder).or_default().entry(from).or_default();
            imports
                .entry(to)
                .or_insert_with(|| format!("{}:{line}", path.display()));
        }
    }
    let mut found = Vec::new();
    for (folder, imports) in &folders {
        for (from, targets) in imports {
            for (to, place) in targets {
                if reaches(imports, to, from) {
                    found.push(format!(
                        "{place}: in `{folder}`, {from} imports {to}, and {to} {from}"
                    ));
                }
            }
        }
    }
    found
}

/// The longest of `modules` that `path` begins with.
fn longest_of<'a>(modules: &'a BTreeSet<String>, path: &str) -> Option<&'a String> {
    let matching = modules.iter().filter(|module| contains(module, path));
    matching.max_by_key(|module| module.len())
}

/// The folder in which the ways to two modules part, and the names of both ways there. `None` if one module contains the
/// other.
fn siblings(one: &str, other: &str) -> Option<(String, String, String)> {
    let (mut ones, mut others) = (one.split("::"), other.split("::"));
    let mut folder = Vec::new();
    loop {
        match (ones.next(), others.next()) {
            (Some(one), Some(other)) if one == other => folder.push(one),
            (Some(one), Some(other)) => {
                return Some((folder.join("::"), one.to_owned(), other.to_owned()));
            }
            _ => return None,
        }
    }
}

/// Whether a chain of imports leads from one module to the other.
fn reaches(imports: &BTreeMap<String, BTreeMap<String, String>>, from: &str, to: &str) -> bool {
    let mut reached = BTreeSet::from([from]);
    let mut left = vec![from];
    while let Some(module) = left.pop() {
        if module == to {
            return true;
        }
        let next = imports.get(module).into_iter().flat_map(BTreeMap::keys);
        left.extend(next.map(String::as_str).filter(|next| reached.insert(next)));
    }
    false
}

/// Every use of `thread::sleep` in the file at `path`, one line each.
pub fn sleeps(path: &Path, text: &str) -> Vec<String> {
    let lines = mentions(text).sleeps;
    lines
        .iter()
        .map(|line| format!("{}:{line}", path.display()))
        .collect()
}

/// The names that lib.rs puts at the crate's top, each with the module it comes from.
pub fn reexports(lib: &str) -> HashMap<String, String> {
    let file = syn::parse_file(lib).expect("lib.rs is Rust");
    let mut names = HashMap::new();
    for item in &file.items {
        let Item::Use(item) = item else { continue };
        if !matches!(item.vis, Visibility::Public(_)) {
            continue;
        }
        for path in flatten(&item.tree) {
            let path: Vec<_> = path
                .into_iter()
                .filter(|(name, _)| name != "crate")
                .collect();
            if let Some(((name, _), modules)) =
                path.split_last().filter(|(_, rest)| !rest.is_empty())
            {
                let modules: Vec<_> = modules.iter().map(|(name, _)| name.as_str()).collect();
                names.insert(name.clone(), modules.join("::"));
            }
        }
    }
    names
}

type Segments = Vec<(String, Span)>;

/// `a::{b, c::d}` as `a::b` and `a::c::d`; a renamed item under its new name.
fn flatten(tree: &UseTree) -> Vec<Segments> {
    match tree {
        UseTree::Path(path) => {
            let mut all = flatten(&path.tree);
            for rest in &mut all {
                rest.insert(0, (path.ident.to_string(), path.ident.span()));
            }
            all
        }
        UseTree::Name(name) => vec![vec![(name.ident.to_string(), name.ident.span())]],
        UseTree::Rename(name) => vec![vec![(name.rename.to_string(), name.rename.span())]],
        UseTree::Glob(glob) => vec![vec![("*".to_owned(), glob.star_token.spans[0])]],
        UseTree::Group(group) => group.items.iter().flat_map(flatten).collect(),
    }
}

/// The mentions in a file, with their lines.
#[derive(Default)]
struct Mentions {
    /// The paths that follow `crate::`.
    of_crate: Vec<(String, usize)>,
    sleeps: Vec<usize>,
}

fn mentions(text: &str) -> Mentions {
    let file = syn::parse_file(text).expect("the library is Rust");
    let mut mentions = Mentions::default();
    mentions.visit_file(&file);
    mentions
}

impl Mentions {
    fn path(&mut self, segments: &[(String, Span)]) {
        let names: Vec<_> = segments.iter().map(|(name, _)| name.as_str()).collect();
        if let ["crate", path @ ..] = names.as_slice()
            && !path.is_empty()
        {
            let line = segments[1].1.start().line;
            self.of_crate.push((path.join("::"), line));
        }
        if let [.., "thread", "sleep"] = names.as_slice() {
            self.sleeps.push(segments[0].1.start().line);
        }
    }
}

/// Whether an item is compiled for tests only: `cfg(test)` or `cfg(all(test, ..))`.
fn is_test_code(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let Meta::List(list) = &attribute.meta else {
            return attribute.path().is_ident("test");
        };
        let condition = list.tokens.to_string().replace(' ', "");
        list.path.is_ident("cfg") && (condition == "test" || condition.starts_with("all(test,"))
    })
}

impl<'ast> Visit<'ast> for Mentions {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if !is_test_code(&item.attrs) {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        if !is_test_code(&item.attrs) {
            visit::visit_item_fn(self, item);
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        if !is_test_code(&item.attrs) {
            visit::visit_impl_item_fn(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        if !is_test_code(&item.attrs) {
            flatten(&item.tree).iter().for_each(|path| self.path(path));
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let segments: Segments = path
            .segments
            .iter()
            .map(|segment| (segment.ident.to_string(), segment.ident.span()))
            .collect();
        self.path(&segments);
        visit::visit_path(self, path);
    }

    /// The inside of a macro is not parsed, so only its tokens can be checked.
    fn visit_macro(&mut self, item: &'ast syn::Macro) {
        if item
            .tokens
            .to_string()
            .replace(' ', "")
            .contains("thread::sleep(")
        {
            self.sleeps
                .push(item.path.segments[0].ident.span().start().line);
        }
        visit::visit_macro(self, item);
    }
}

#[test]
fn mentions_are_found_outside_tests() {
    let text = "
        use crate::{acquire::Queue, store};
        fn f() { crate::client::open(); std::thread::sleep(d); select! { x => thread::sleep(d) } }
        #[cfg(test)] mod tests { use crate::mutex::Mutex; }
    ";
    let mentions = mentions(text);
    let names: Vec<_> = mentions
        .of_crate
        .iter()
        .map(|(name, _)| name.as_str())
        .collect();
    assert_eq!(names, ["acquire::Queue", "store", "client::open"]);
    assert_eq!(mentions.sleeps, [3, 3]);
}

#[test]
fn circles_are_found() {
    let file = |path: &str, text: &str| (PathBuf::from(path), text.to_owned());
    let texts = [
        file("src/wire/mod.rs", "use crate::wire::a::A;"),
        file(
            "src/wire/a.rs",
            "use crate::wire::b::c::C; use crate::wire::W;",
        ),
        file("src/wire/b/c.rs", "fn f(_: crate::wire::a::A) {}"),
        file("src/util.rs", "use crate::util::U;"),
    ];
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let found = circles(&texts, &root);
    assert_eq!(
        found,
        [
            "src/wire/a.rs:1: in `wire`, a imports b, and b a",
            "src/wire/b/c.rs:1: in `wire`, b imports a, and a b",
        ]
    );
}
