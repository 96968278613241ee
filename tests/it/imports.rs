//! The modules of each crate import each other without cycles, and `proxy` and `control` not at all.
//!
//! This is a scan of the source text: `use` declarations and inline paths of product code. An import counts for the module
//! that is the longest prefix of its path, so a re-export is an import of the module that re-exports.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

type Name = Vec<String>;
/// The modules that each module imports, with the paths of the imports.
type Imports = BTreeMap<Name, BTreeMap<Name, BTreeSet<String>>>;

#[test]
fn modules_import_each_other_without_cycles() {
    let mut report = String::new();
    for folder in crates() {
        let imports = imports(&folder);
        for component in components(&imports) {
            if !is_parent_with_child(&component) {
                describe(&mut report, &imports, &component);
            }
        }
    }
    assert!(report.is_empty(), "cycles of imports:\n{report}");
}

#[test]
fn proxy_and_control_import_only_shared_modules() {
    for folder in crates() {
        for (from, targets) in imports(&folder) {
            for (to, paths) in targets {
                let sides = (
                    from.get(1).map(String::as_str),
                    to.get(1).map(String::as_str),
                );
                let apart = matches!(
                    sides,
                    (Some("proxy"), Some("control")) | (Some("control"), Some("proxy"))
                );
                assert!(!apart, "{} imports {paths:?}", from.join("::"));
            }
        }
    }
}

#[test]
fn the_scan_finds_imports_of_all_forms() {
    let text = r##"
        mod child;
        #[cfg(test)]
        mod tests { use crate::none; }
        #[cfg(test)]
        use crate::none;
        use std::fmt;
        use crate::{a::{self, One}, b::*, c as d};
        pub(in crate::none) use super::e::Two;
        // crate::none
        const TEXT: &str = "crate::none { \" ";
        const RAW: &str = r#"crate::none " { "#;
        fn f<'a>(x: &'a u8) -> [char; 2] { child::run(d::deep::g::<crate::h::Three>()); ['{', '\''] }
        fn g() { outer::child::other(); std::child::other() }
    "##;
    let mut source = Source::default();
    source.read(text, &["k".to_owned(), "m".to_owned()]);
    let paths: BTreeSet<_> = source.paths.iter().map(|path| path.join("::")).collect();
    let wanted = [
        "k::a::One",
        "k::a",
        "k::b",
        "k::c",
        "k::c::deep::g",
        "k::e::Two",
        "k::h::Three",
        "k::m::child::run",
    ];
    assert_eq!(paths, wanted.map(str::to_owned).into());
    assert_eq!(source.children, ["child"]);
}

#[test]
fn a_cycle_is_found_and_a_parent_with_its_child_is_none() {
    let graph = |edges: &[(&str, &str)]| {
        let mut imports = Imports::new();
        let name = |text: &str| text.split("::").map(str::to_owned).collect::<Name>();
        for (from, to) in edges {
            let from = imports.entry(name(from)).or_default();
            from.entry(name(to)).or_default().insert("Item".to_owned());
            imports.entry(name(to)).or_default();
        }
        let mut report = String::new();
        for component in components(&imports) {
            if !is_parent_with_child(&component) {
                describe(&mut report, &imports, &component);
            }
        }
        report
    };
    assert_eq!(
        graph(&[("k::a", "k::b"), ("k::b", "k::c"), ("k::a", "k::c")]),
        ""
    );
    assert_eq!(
        graph(&[("k::a", "k::a::b"), ("k::a::b", "k::a"), ("k", "k::a")]),
        ""
    );
    assert_eq!(
        graph(&[
            ("k::a", "k::b"),
            ("k::b", "k::c"),
            ("k::c", "k::a"),
            ("k", "k::a")
        ]),
        "3 modules:\n  k::a -> k::b (Item)\n  k::b -> k::c (Item)\n  k::c -> k::a (Item)\n"
    );
    assert_ne!(graph(&[("k::a", "k::b"), ("k::b", "k::a")]), "");
}

/// The folders of all packages that ship.
fn crates() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let entries = fs::read_dir(root).unwrap();
    let mut folders: Vec<_> = entries
        .map(|entry| entry.unwrap().path())
        .filter(|folder| folder.join("src/lib.rs").exists())
        .collect();
    folders.push(root.to_owned());
    assert!(folders.len() > 5, "{folders:?}");
    folders
}

/// A parent that uses its own child, which uses the parent, is one module in two files.
fn is_parent_with_child(component: &[Name]) -> bool {
    match component {
        [_] => true,
        [one, other] => {
            other.split_last().is_some_and(|(_, parent)| parent == one)
                || one.split_last().is_some_and(|(_, parent)| parent == other)
        }
        _ => false,
    }
}

fn describe(report: &mut String, imports: &Imports, component: &[Name]) {
    writeln!(report, "{} modules:", component.len()).unwrap();
    for from in component {
        for (to, paths) in &imports[from] {
            if component.contains(to) {
                let items: Vec<_> = paths.iter().map(String::as_str).collect();
                let (from, to) = (from.join("::"), to.join("::"));
                writeln!(report, "  {from} -> {to} ({})", items.join(", ")).unwrap();
            }
        }
    }
}

/// Reads all module files of a crate, beginning with its root, and the imports between them.
fn imports(folder: &Path) -> Imports {
    let krate = folder.file_name().unwrap().to_string_lossy().into_owned();
    let source = folder.join("src");
    let (krate, root) = match source.join("lib.rs") {
        lib if lib.exists() => (krate, lib),
        _ => ("bin".to_owned(), source.join("main.rs")),
    };
    let mut files = vec![(vec![krate], root)];
    let mut modules = BTreeMap::new();
    while let Some((module, file)) = files.pop() {
        let mut read = Source::default();
        read.read(&fs::read_to_string(&file).unwrap(), &module);
        for child in &read.children {
            let below: PathBuf = module[1..].iter().collect();
            let file = source.join(below).join(child).with_extension("rs");
            files.push(([&module[..], std::slice::from_ref(child)].concat(), file));
        }
        modules.insert(module, read);
    }
    let owner = |path: &[String]| {
        let mut length = path.len();
        while !modules.contains_key(&path[..length]) {
            length -= 1;
        }
        length
    };
    let mut imports = Imports::new();
    for (module, read) in &modules {
        let targets = imports.entry(module.clone()).or_default();
        for path in &read.paths {
            let (target, item) = path.split_at(owner(path));
            if target != &module[..] {
                let paths = targets.entry(target.to_owned()).or_default();
                paths.insert(item.join("::"));
            }
        }
    }
    imports
}

/// Tarjan's strongly connected components.
fn components(imports: &Imports) -> Vec<Vec<Name>> {
    #[derive(Default)]
    struct Search<'a> {
        numbers: BTreeMap<&'a Name, (usize, usize)>,
        stack: Vec<&'a Name>,
        found: Vec<Vec<Name>>,
    }

    fn visit<'a>(search: &mut Search<'a>, imports: &'a Imports, module: &'a Name) -> usize {
        let number = search.numbers.len();
        let mut low = number;
        search.numbers.insert(module, (number, low));
        search.stack.push(module);
        for target in imports[module].keys() {
            let reached = match search.numbers.get(target) {
                None => visit(search, imports, target),
                Some((number, _)) if search.stack.contains(&target) => *number,
                Some(_) => continue,
            };
            low = low.min(reached);
        }
        if low == number {
            let at = search
                .stack
                .iter()
                .position(|other| *other == module)
                .unwrap();
            let mut component: Vec<_> = search.stack.drain(at..).cloned().collect();
            component.sort();
            search.found.push(component);
        }
        low
    }

    let mut search = Search::default();
    for module in imports.keys() {
        if !search.numbers.contains_key(module) {
            visit(&mut search, imports, module);
        }
    }
    search.found
}

/// The product code of one file: its child modules and the paths below the crate that it names.
#[derive(Default)]
struct Source {
    children: Vec<String>,
    paths: Vec<Name>,
}

impl Source {
    fn read(&mut self, text: &str, module: &[String]) {
        let tokens = product(&tokens(text));
        let is_child = |w: &&[String]| w[0] == "mod" && w[2] == ";";
        let children = tokens.windows(3).filter(is_child);
        self.children = children.map(|w| w[1].clone()).collect();
        // Names with which paths of this file may begin: its children and its imports.
        let mut local = BTreeMap::new();
        for child in &self.children {
            local.insert(
                child.clone(),
                [module, std::slice::from_ref(child)].concat(),
            );
        }
        let uses = |at: &usize| tokens[*at] == "use";
        let starts: Vec<usize> = (0..tokens.len()).filter(uses).collect();
        // Twice, because an import may begin with a name from another import.
        for _ in 0..2 {
            for start in &starts {
                for (name, path) in tree(&tokens, &mut (start + 1), &[]) {
                    if let Some(path) = absolute(&path, module, &local) {
                        local.insert(name, path.clone());
                        self.paths.push(path);
                    }
                }
            }
        }
        let mut at = 0;
        while at < tokens.len() {
            if tokens[at] == "use" {
                at += 1;
                tree(&tokens, &mut at, &[]);
            } else if is_name(&tokens[at]) && tokens.get(at + 1).is_some_and(|next| next == "::") {
                let within = at > 0 && (tokens[at - 1] == "::" || tokens[at - 1] == "in");
                let path = path(&tokens, &mut at);
                let path = absolute(&path, module, &local).filter(|_| !within);
                self.paths.extend(path);
            } else {
                at += 1;
            }
        }
    }
}

/// The names and whole paths of a tree of imports.
fn tree(tokens: &[String], at: &mut usize, prefix: &[String]) -> Vec<(String, Name)> {
    let mut whole = prefix.to_vec();
    whole.extend(path(tokens, at));
    if whole.len() > 1 && whole.last().is_some_and(|last| last == "self") {
        whole.pop();
    }
    let mut found = Vec::new();
    match tokens[*at].as_str() {
        "{" => {
            *at += 1;
            while tokens[*at] != "}" {
                found.extend(tree(tokens, at, &whole));
                *at += usize::from(tokens[*at] == ",");
            }
            *at += 1;
        }
        "*" => {
            *at += 1;
            found.push((String::new(), whole));
        }
        "as" => {
            found.push((tokens[*at + 1].clone(), whole));
            *at += 2;
        }
        _ => found.push((whole.last().cloned().unwrap_or_default(), whole)),
    }
    found
}

/// The path from a token on; it ends at the first token that is not part of a path.
fn path(tokens: &[String], at: &mut usize) -> Name {
    let mut path = Vec::new();
    while is_name(&tokens[*at]) {
        path.push(tokens[*at].clone());
        *at += 1;
        if tokens[*at] != "::" {
            break;
        }
        *at += 1;
    }
    path
}

/// The path below the crate's root, if it leads there.
fn absolute(path: &[String], module: &[String], local: &BTreeMap<String, Name>) -> Option<Name> {
    let mut base = match path.first()?.as_str() {
        "crate" => module[..1].to_vec(),
        "self" => module.to_vec(),
        "super" => module[..module.len() - 1].to_vec(),
        name => local.get(name)?.clone(),
    };
    for name in &path[1..] {
        match name.as_str() {
            "super" => drop(base.pop()),
            name => base.push(name.to_owned()),
        }
    }
    Some(base)
}

/// Removes items behind `#[cfg(test)]`.
fn product(tokens: &[String]) -> Vec<String> {
    let mark = ["#", "[", "cfg", "(", "test", ")", "]"];
    let mut kept = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        if !tokens[at..].iter().take(mark.len()).eq(mark.iter()) {
            kept.push(tokens[at].clone());
            at += 1;
            continue;
        }
        at += mark.len();
        let mut depth = 0_u32;
        while let Some(token) = tokens.get(at) {
            at += 1;
            match token.as_str() {
                "{" | "(" | "[" => depth += 1,
                "}" | ")" | "]" => depth -= 1,
                _ => {}
            }
            if depth == 0 && matches!(token.as_str(), ";" | "}" | ",") {
                break;
            }
        }
    }
    kept
}

fn is_name(token: &str) -> bool {
    token.starts_with(|c: char| c.is_alphabetic() || c == '_') && token != "as"
}

/// Names, `::` and single characters, without comments, strings and blanks.
fn tokens(text: &str) -> Vec<String> {
    let mut tokens: Vec<String> = Vec::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let name = rest.find(|c: char| !c.is_alphanumeric() && c != '_');
        let raw = rest.strip_prefix('b').unwrap_or(rest).strip_prefix('r');
        let raw = raw.filter(|raw| raw.trim_start_matches('#').starts_with('"'));
        let length = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if let Some(raw) = raw {
            let hashes = raw.len() - raw.trim_start_matches('#').len();
            let end = format!("\"{}", "#".repeat(hashes));
            let begin = rest.len() - raw.len() + hashes + 1;
            begin + rest[begin..].find(&end).unwrap() + end.len()
        } else if first == '"' {
            quoted(rest, '"')
        } else if let Some(length) = character(rest) {
            length
        } else if let Some(length @ 1..) = name {
            tokens.push(rest[..length].to_owned());
            length
        } else {
            let length = if rest.starts_with("::") {
                2
            } else {
                first.len_utf8()
            };
            if !first.is_whitespace() {
                tokens.push(rest[..length].to_owned());
            }
            length
        };
        rest = &rest[length..];
    }
    tokens
}

/// The length of a quoted text with its quotes.
fn quoted(text: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        if c == quote && !escaped {
            return at + 1;
        }
        escaped = c == '\\' && !escaped;
    }
    text.len()
}

/// The length of a character between quotes; a lifetime has none.
fn character(text: &str) -> Option<usize> {
    let inside = text.strip_prefix('\'')?;
    let second = inside.char_indices().nth(1);
    if inside.starts_with('\\') || second.is_some_and(|(_, c)| c == '\'') {
        return Some(quoted(text, '\''));
    }
    None
}
