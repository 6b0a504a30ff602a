from grail_advantage.analyze.command import main

if __name__ == "__main__":
    main()
